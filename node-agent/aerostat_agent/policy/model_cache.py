"""Which models leave the node's cache so that another one fits, or why none may.

Least recently used first, and no more than it takes. Never one that an Instance of this node needs, nor one on its way; and nothing at all
where even everything that may go would not be enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from aerostat_core.ids import Bytes, Seconds
from aerostat_core.quantities import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model on disk, whole or in part. `promised`: what it may grow to, while a process makes it; it is on its way then."""

    key: str
    n_bytes: Bytes
    last_used: Seconds
    is_needed: bool
    promised: Bytes = 0

    @property
    def may_go(self) -> bool:
        return not self.is_needed and not self.promised

    @property
    def growth(self) -> Bytes:
        return max(self.promised - self.n_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """`limit`: of the cache; None: all that the disk has. `free`: on the disk, whoever uses it."""

    limit: Bytes | None
    free: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """`reason` CacheFull: the limit is what there is too little of; DiskFull: the disk."""

    reason: str
    message: str


def make_room(asked: Bytes, entries: Sequence[Entry], disk: Disk) -> Eviction | NoRoom:
    """What goes before a model grows by `asked`; what others on their way were promised is theirs."""
    going = _in_order(entries)
    to_win = sum(entry.n_bytes for entry in going)
    over_limit, over_disk = _excess(asked, entries, disk)
    if max(over_limit, over_disk) > to_win:
        return _refusal(asked, entries, disk, to_win, is_limit=over_limit > to_win)
    return Eviction(keys=_first(going, max(over_limit, over_disk)))


def trim(entries: Sequence[Entry], disk: Disk) -> Eviction:
    """What goes when nobody asks: as much of it as there is, where the cache is larger than its limit."""
    return Eviction(keys=_first(_in_order(entries), _excess(0, entries, disk)[0]))


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    return sorted((entry for entry in entries if entry.may_go), key=lambda entry: (entry.last_used, entry.key))


def _excess(asked: Bytes, entries: Sequence[Entry], disk: Disk) -> tuple[Bytes, Bytes]:
    """By how much the limit, and the disk, would be passed."""
    growth = asked + sum(entry.growth for entry in entries)
    used = sum(entry.n_bytes for entry in entries)
    return max(used + growth - disk.limit, 0) if disk.limit is not None else 0, max(growth - disk.free, 0)


def _first(going: Sequence[Entry], enough: Bytes) -> tuple[str, ...]:
    keys: list[str] = []
    won = 0
    for entry in going:
        if won >= enough:
            break
        won += entry.n_bytes
        keys.append(entry.key)
    return tuple(keys)


def _refusal(asked: Bytes, entries: Sequence[Entry], disk: Disk, to_win: Bytes, *, is_limit: bool) -> NoRoom:
    growth = sum(entry.growth for entry in entries)
    if not is_limit:
        there = max(disk.free - growth, 0) + to_win
        message = (
            f"{format_size(asked)} more are needed on the disk of the model cache, {format_size(there)} can be had "
            f"({format_size(disk.free)} are free, {format_size(to_win)} is what no Instance needs): free disk space, or put the cache on "
            "a larger disk (nodes.modelCache in the chart's values; --model-cache)"
        )
        return NoRoom(reason="DiskFull", message=message)
    assert disk.limit is not None, "it was passed"
    kept = sum(entry.n_bytes for entry in entries) + growth - to_win
    message = (
        f"{format_size(asked)} more are needed in the model cache, {format_size(max(disk.limit - kept, 0))} can be had (its limit is "
        f"{format_size(disk.limit)}, {format_size(kept)} is what Instances of this node need): raise the limit (nodes.modelCacheLimit in "
        "the chart's values; --model-cache-limit), or run fewer models on this node"
    )
    return NoRoom(reason="CacheFull", message=message)
