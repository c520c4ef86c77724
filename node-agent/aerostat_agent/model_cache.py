"""The node's cache of models as the agent keeps it: who gets room in it, what is evicted for that, and what no Instance needs any more.

Decided in `policy.model_cache`; preparers fill the cache, and the locks of `ModelCache` keep them and engines from being evicted, whatever
was decided. Nothing is remembered across agents but what lies in the folder: a new agent sweeps what the last one, and its preparers, left.
"""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aerostat_agent.policy.model_cache import Disk, Entry, Eviction, NoRoom, make_room, trim
from aerostat_core.errors import PermanentError, SettingError
from aerostat_core.ids import Bytes, Seconds
from aerostat_core.quantities import format_size
from aerostat_runtime.model_cache import Kept, ModelCache

_log = logging.getLogger(__name__)

TIDY_EVERY: Final[Seconds] = 60.0

Ask = Callable[[str, Bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What Instances of this node need: models by the sources that mean them, and the folders that engines serve."""

    sources: frozenset[tuple[str, bool]]  # a URI, and whether with the model's code
    folders: frozenset[Path]


@dataclass(frozen=True, slots=True, eq=False)
class _Promise:
    """That a model may grow until it has so many bytes."""

    key: str
    n_bytes: Bytes


class NodeCache:
    """`needs` is asked for each decision. `evicts` is called with the folder of a model that is to go, before it does.

    Raises SettingError for a root that cannot be used.
    """

    def __init__(self, root: Path, limit: Bytes | None, *, needs: Callable[[], Needs], evicts: Callable[[Path], None]) -> None:
        try:
            self._cache = ModelCache(root)
        except OSError as error:
            raise SettingError(f"--model-cache {root} cannot be used: {error}; name a folder in which this process may write") from error
        self.limit = limit
        self.n_bytes: Bytes = 0
        self.n_evicted = 0
        self._needs = needs
        self._evicts = evicts
        self._promises: list[_Promise] = []
        self._deciding = asyncio.Lock()

    @property
    def root(self) -> Path:
        return self._cache.root

    async def run(self) -> None:
        """Until cancelled: sweeps once, then keeps to the limit."""
        await asyncio.to_thread(self._cache.sweep)
        while True:
            try:
                async with self._deciding:
                    kept = await self._count()
                    await self._evict(trim(self._entries(kept), self._disk()), kept)
            except OSError as error:  # engines serve on, whatever became of the folder
                _log.warning("the model cache is not kept within its limit, tried again: %s", error)
            await asyncio.sleep(TIDY_EVERY)

    @contextmanager
    def preparation(self) -> Iterator[Ask]:
        """It is given a way to ask for so many bytes more for a model, which raises PermanentError; what it is promised ends with it."""
        mine: list[_Promise] = []

        async def ask(key: str, need: Bytes) -> None:
            try:
                mine.append(await self._make_room(key, need))
            except OSError as error:
                raise PermanentError("CacheUnusable", f"the model cache cannot be looked at: {error}; restore {self.root}") from error

        try:
            yield ask
        finally:
            self._promises = [promise for promise in self._promises if promise not in mine]

    async def _make_room(self, key: str, need: Bytes) -> _Promise:
        """Each round evicts something or learns that it is in use, until it fits."""
        stays = {key}
        async with self._deciding:
            while True:
                kept = await self._count()
                decided = make_room(need, self._entries(kept, stays), self._disk())
                if isinstance(decided, NoRoom):
                    raise PermanentError(decided.reason, decided.message)
                if not decided.keys:
                    promise = _Promise(key, need + sum(entry.n_bytes for entry in kept if entry.key == key))
                    self._promises.append(promise)
                    return promise
                stays |= await self._evict(decided, kept)

    async def _count(self) -> list[Kept]:
        kept = await asyncio.to_thread(self._cache.kept)
        self.n_bytes = sum(each.n_bytes for each in kept)
        return kept

    def _entries(self, kept: Collection[Kept], stays: Collection[str] = ()) -> list[Entry]:
        """A part of a model that nobody works on may go whoever needs it: two that wait for each other's room would wait for ever."""
        needs = self._needs()
        keys = {self._cache.key_at(folder) for folder in needs.folders}
        keys |= {self._cache.key_of(uri, with_code=with_code) or self._cache.key_of(uri) for uri, with_code in needs.sources}
        promised: dict[str, Bytes] = {}
        for promise in self._promises:
            promised[promise.key] = max(promised.get(promise.key, 0), promise.n_bytes)
        entries = [
            Entry(
                key=each.key,
                n_bytes=each.n_bytes,
                last_used=each.last_used,
                is_needed=each.key in stays or (each.key in keys and each.is_whole),
                promised=0 if each.key in stays else promised.get(each.key, 0),
            )
            for each in kept
        ]
        begun = {each.key for each in kept}
        entries += [
            Entry(key=key, n_bytes=0, last_used=0.0, is_needed=False, promised=n_bytes)
            for key, n_bytes in promised.items()
            if key not in begun and key not in stays
        ]
        return entries

    def _disk(self) -> Disk:
        return Disk(limit=self.limit, free=shutil.disk_usage(self.root).free)

    async def _evict(self, eviction: Eviction, kept: Collection[Kept]) -> set[str]:
        """Which of them are in use after all."""
        by_key = {each.key: each for each in kept}
        for key in eviction.keys:  # all before the first wait: from here on nobody starts an engine from them
            self._evicts(self._cache.model(key))
        stayed = set()
        for key in eviction.keys:
            if await asyncio.to_thread(self._cache.evict, by_key[key]):
                self.n_evicted += 1
                _log.info("evicted %s, %s: no Instance of this node needs it", key, format_size(by_key[key].n_bytes))
            else:
                stayed.add(key)
        return stayed
