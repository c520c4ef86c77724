"""What leaves a full cache: the least recently used of what nobody needs, no more than it takes, and nothing in vain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_agent.policy.model_cache import Disk, Entry, Eviction, NoRoom, make_room, trim
from aerostat_core.ids import Bytes, Seconds

pytestmark = pytest.mark.cpu

GI = 1 << 30


def entry(key: str, n_bytes: Bytes = GI, *, used: Seconds = 0.0, needed: bool = False, promised: Bytes = 0) -> Entry:
    return Entry(key=key, n_bytes=n_bytes, last_used=used, is_needed=needed, promised=promised)


def disk(limit: Bytes | None = None, free: Bytes = 100 * GI) -> Disk:
    return Disk(limit=limit, free=free)


def evicted(decided: Eviction | NoRoom) -> tuple[str, ...]:
    assert isinstance(decided, Eviction), decided
    return decided.keys


def test_what_was_used_longest_ago_goes_first_and_no_more_than_it_takes() -> None:
    entries = [entry("new", used=3), entry("old", used=1), entry("middle", used=2)]
    assert evicted(make_room(GI, entries, disk(4 * GI))) == ()
    assert evicted(make_room(GI, entries, disk(3 * GI))) == ("old",)
    assert evicted(make_room(GI + 1, entries, disk(3 * GI))) == ("old", "middle")


def test_a_disk_without_room_is_a_limit_too() -> None:
    assert evicted(make_room(2 * GI, [entry("old")], disk(free=GI))) == ("old",)


def test_what_is_needed_or_on_its_way_stays_and_the_refusal_says_what_there_is() -> None:
    entries = [entry("needed", needed=True), entry("coming", GI // 2, promised=GI), entry("old")]
    decided = make_room(2 * GI, entries, disk(3 * GI))
    assert isinstance(decided, NoRoom)
    assert decided.reason == "CacheFull"
    assert decided.message.startswith("2Gi more are needed in the model cache, 1Gi can be had (its limit is 3Gi, 2Gi is what Instances")
    assert "nodes.modelCacheLimit" in decided.message


def test_a_disk_that_is_too_small_is_told_with_its_bytes() -> None:
    decided = make_room(4 * GI, [entry("old"), entry("needed", needed=True)], disk(50 * GI, free=GI))
    assert isinstance(decided, NoRoom)
    assert decided.reason == "DiskFull"
    assert "4Gi more are needed" in decided.message
    assert "2Gi can be had (1Gi are free, 1Gi is what no Instance needs): free disk space" in decided.message


def test_a_cache_over_its_limit_loses_what_may_go_even_if_that_is_not_enough() -> None:
    entries = [entry("needed", 3 * GI, needed=True), entry("old", used=1), entry("older")]
    assert trim(entries, disk(4 * GI)).keys == ("older",)
    assert trim(entries, disk(GI)).keys == ("older", "old")
    assert trim(entries, disk(None, free=0)).keys == (), "a full disk evicts when somebody asks"


entries_drawn = st.lists(
    st.builds(
        Entry,
        key=st.uuids().map(str),
        n_bytes=st.integers(0, 100),
        last_used=st.integers(0, 5).map(float),
        is_needed=st.booleans(),
        promised=st.integers(0, 150),
    ),
    max_size=8,
    unique_by=lambda e: e.key,
)
disks_drawn = st.builds(Disk, limit=st.none() | st.integers(0, 500), free=st.integers(0, 500))


@given(asked=st.integers(0, 300), entries=entries_drawn, disk=disks_drawn)
def test_an_eviction_makes_the_room_it_is_for_and_a_refusal_is_true(asked: int, entries: list[Entry], disk: Disk) -> None:
    decided = make_room(asked, entries, disk)
    used, growth = sum(e.n_bytes for e in entries), asked + sum(max(e.promised - e.n_bytes, 0) for e in entries)
    may_go = [e for e in entries if not e.is_needed and not e.promised]

    def fits(won: Bytes) -> bool:
        return growth <= disk.free + won and (disk.limit is None or used - won + growth <= disk.limit)

    if isinstance(decided, NoRoom):
        assert not fits(sum(e.n_bytes for e in may_go))
        return
    gone = [next(e for e in entries if e.key == key) for key in decided.keys]
    assert set(decided.keys) <= {e.key for e in may_go}
    assert fits(sum(e.n_bytes for e in gone))
    if gone:
        assert not fits(sum(e.n_bytes for e in gone[:-1])), "the last one was not in vain"
        assert all(e.last_used >= gone[-1].last_used for e in may_go if e not in gone)


@given(entries=entries_drawn, disk=disks_drawn, order=st.randoms(use_true_random=False))
def test_the_order_in_which_a_disk_is_read_changes_nothing(entries: list[Entry], disk: Disk, order: object) -> None:
    shuffled = list(entries)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert make_room(50, entries, disk) == make_room(50, shuffled, disk)
    assert trim(entries, disk) == trim(shuffled, disk)
