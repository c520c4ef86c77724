"""`Cluster` over a state folder: what an API server is to us, for `aerostat up` and for tests.

Any number of processes open the same folder. Each write is what an API server would make of it (`writes`), is stored
as a file (`store`), and seen by every watcher through file events. An event only says that something changed: the
watcher lists and compares (`relisting`), so events that coalesce or get lost cost time, never a change.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

import orjson
import watchfiles

from aerostat_core.clock import Clock
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.resources import Resource
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.port import Kind, Note, WatchEvent
from aerostat_runtime.cluster.relisting import NextWakeup, watch_by_listing
from aerostat_runtime.cluster.store import REVISION_FILE, ObjectStore, replace_file
from aerostat_runtime.cluster.writes import Writes

RELIST: Final[Seconds] = 5.0  # for what no event told
EVENTS_FILE: Final = "events.jsonl"
_EVENTS_MAX_BYTES = 1 << 20
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class FolderCluster:
    """The `Cluster` port; and `put` and `notes`, which only a folder needs."""

    def __init__(self, state: Path, *, clock: Clock | None = None, admission: Admission | None = None) -> None:
        self.state = state
        self._store = ObjectStore(state)
        self._clock = clock or SystemClock()
        self._writes = Writes(self._store, admission or Admission.of_this_build(), self._clock)
        self._wakeups = _Wakeups(self._store.root)
        self._write_lock = asyncio.Lock()  # one thread at a time waits for the file lock

    async def list(self, kind: Kind) -> list[Resource]:
        return await asyncio.to_thread(self._store.list, kind)

    def watch(self, kind: Kind) -> AsyncIterator[WatchEvent]:
        return watch_by_listing(kind, self.list, self._wakeups.subscribe)

    async def apply(self, resource: Resource) -> Resource:
        return await self._alone(lambda: self._writes.apply(resource))

    async def put(self, resource: Resource) -> Resource:
        """Write a Node, status and all; no schema is known for it. (In a cluster kubelets write Nodes.)"""
        return await self._alone(lambda: self._writes.put(resource))

    async def patch_status(self, kind: Kind, name: NamespacedName, status: Resource) -> bool:
        return await self._alone(lambda: self._writes.patch_status(kind, name, status))

    async def delete(self, kind: Kind, name: NamespacedName) -> None:
        """Delete it and, at once, what only it owned."""
        await self._alone(lambda: self._writes.delete(kind, name))

    async def collect_garbage(self) -> None:
        """Delete objects whose owners are all gone. `delete` does; this is for a state folder that somebody edited."""
        await self._alone(self._writes.collect_garbage)

    async def note(self, note: Note) -> None:
        try:
            await self._alone(lambda: self._note(note))
        except (TemporaryError, PermanentError) as error:
            _log.warning("event of %s %s not recorded: %s", note.kind, note.name, error)

    async def secret(self, name: NamespacedName) -> Mapping[str, bytes]:
        message = f"aerostat up keeps no Secrets, so none is called {name.name}: remove secretRef and set HF_TOKEN in its environment"
        raise PermanentError("NoSecrets", message)

    async def notes(self) -> tuple[Resource, ...]:
        """Recorded events, the oldest first: kind, name, reason, message, warning, time."""
        return await asyncio.to_thread(lambda: tuple(orjson.loads(line) for line in self._event_lines()))

    async def close(self) -> None:
        """Ends all watches."""
        await self._wakeups.close()

    async def _alone(self, write: Callable[[], _T]) -> _T:
        async with self._write_lock:
            return await asyncio.to_thread(self._locked, write)

    def _locked(self, write: Callable[[], _T]) -> _T:
        with self._store.writing():
            return write()

    def _note(self, note: Note) -> None:
        path = self.state / EVENTS_FILE
        now = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = {
            "time": now,
            "kind": note.kind,
            "name": str(note.name),
            "reason": note.reason,
            "message": note.message,
            "warning": note.warning,
        }
        with path.open("ab") as file:
            file.write(orjson.dumps(record) + b"\n")
            size = file.tell()
        if size > _EVENTS_MAX_BYTES:
            lines = self._event_lines()
            replace_file(path, b"\n".join(lines[len(lines) // 2 :]) + b"\n", durable=False)

    def _event_lines(self) -> tuple[bytes, ...]:
        try:
            return tuple((self.state / EVENTS_FILE).read_bytes().splitlines())
        except FileNotFoundError:
            return ()


class _Wakeups:
    """One watcher of the revision file for all watches of a process, for as long as there are any."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._subscribers: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[NextWakeup]:
        """Gives a call that waits for the next change since it returned last; it answers False after `close`."""
        if self._task is None:
            self._stop = asyncio.Event()
            self._task = asyncio.create_task(self._run(self._stop), name=f"watch {self._root}")
            await asyncio.sleep(0)  # its first step registers with the kernel, before the subscriber lists
        task, changed = self._task, asyncio.Event()
        self._subscribers.add(changed)

        async def next_wakeup() -> bool:
            if not task.done():
                await changed.wait()
                changed.clear()
            if task.done():
                task.result()  # raises why it ended, when that was not `close`
            return not task.done()

        try:
            yield next_wakeup
        finally:
            self._subscribers.discard(changed)
            if not self._subscribers:
                await self.close()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            self._stop.set()
            await asyncio.wait({task})

    async def _run(self, stop: asyncio.Event) -> None:
        try:
            async for _ in watchfiles.awatch(
                self._root,
                recursive=False,
                watch_filter=lambda _, path: os.path.basename(path) == REVISION_FILE,
                stop_event=stop,
                debounce=200,
                step=50,
                rust_timeout=int(RELIST * 1000),
                yield_on_timeout=True,
            ):
                self._wake()
        finally:
            asyncio.get_running_loop().call_soon(self._wake)  # once this task is done

    def _wake(self) -> None:
        for changed in self._subscribers:
            changed.set()
