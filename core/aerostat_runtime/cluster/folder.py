"""`Cluster` over a state folder: what an API server is to us, for `aerostat up` and for tests.

Any number of processes open the same folder. Each write is admitted as an API server would (`admission`), stored as a
file (`store`), and seen by every watcher through file events. An event only says that something changed: the watcher
lists and compares resource versions, so events that coalesce or get lost cost time, never a change.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

import orjson
import watchfiles

from aerostat_core.clock import Clock
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.differences import differences
from aerostat_runtime.cluster.port import Change, InvalidResourceError, Kind, Note, WatchEvent
from aerostat_runtime.cluster.store import REVISION_FILE, ObjectStore, replace_file

RELIST: Final[Seconds] = 5.0  # for what no event told
EVENTS_FILE: Final = "events.jsonl"
_EVENTS_MAX_BYTES = 1 << 20
_APPLIED_METADATA = ("labels", "annotations", "ownerReferences")
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class FolderCluster:
    """The `Cluster` port; and `put` and `notes`, which only a folder needs."""

    def __init__(self, state: Path, *, clock: Clock | None = None, admission: Admission | None = None) -> None:
        self.state = state
        self._store = ObjectStore(state)
        self._clock = clock or SystemClock()
        self._admission = admission or Admission.of_this_build()
        self._wakeups = _Wakeups(self._store.root)
        self._write_lock = asyncio.Lock()  # one thread at a time waits for the file lock

    async def list(self, kind: Kind) -> list[Resource]:
        return await asyncio.to_thread(self._store.list, kind)

    async def watch(self, kind: Kind) -> AsyncIterator[WatchEvent]:
        seen: dict[NamespacedName, Resource] = {}
        synced = False
        async with self._wakeups.subscribe() as next_wakeup:
            while True:
                present = {name_of(resource): resource for resource in await self.list(kind)}
                for event in differences(kind, seen, present):
                    yield event
                seen = present
                if not synced:
                    synced = True
                    yield WatchEvent(Change.SYNCED, kind, None)
                if not await next_wakeup():
                    return

    async def apply(self, resource: Resource) -> Resource:
        return await self._write(lambda: self._apply(resource))

    async def put(self, resource: Resource) -> Resource:
        """Write a Node, status and all; no schema is known for it. (In a cluster kubelets write Nodes.)"""
        return await self._write(lambda: self._put(resource))

    async def patch_status(self, kind: Kind, name: NamespacedName, status: Resource) -> bool:
        return await self._write(lambda: self._patch_status(kind, name, status))

    async def delete(self, kind: Kind, name: NamespacedName) -> None:
        """Delete it and, at once, what only it owned."""
        await self._write(lambda: self._delete(kind, name))

    async def collect_garbage(self) -> None:
        """Delete objects whose owners are all gone. `delete` does; this is for a state folder that somebody edited."""
        await self._write(self._collect_garbage)

    async def note(self, note: Note) -> None:
        try:
            await self._write(lambda: self._note(note))
        except (TemporaryError, PermanentError) as error:
            _log.warning("event of %s %s not recorded: %s", note.kind, note.name, error)

    async def notes(self) -> tuple[Resource, ...]:
        """Recorded events, the oldest first: kind, name, reason, message, warning, time."""
        return await asyncio.to_thread(lambda: tuple(orjson.loads(line) for line in self._event_lines()))

    async def close(self) -> None:
        """Ends all watches."""
        await self._wakeups.close()

    async def _write(self, write: Callable[[], _T]) -> _T:
        async with self._write_lock:
            return await asyncio.to_thread(self._write_alone, write)

    def _write_alone(self, write: Callable[[], _T]) -> _T:
        with self._store.writing():
            return write()

    def _apply(self, resource: Resource) -> Resource:
        kind = self._admission.kind_of(resource)
        name = _placed(resource)
        old = self._store.get(kind, name)
        admitted = self._admission.admit(resource, old)
        applied = {key: admitted["metadata"][key] for key in _APPLIED_METADATA if admitted["metadata"].get(key)}
        if old is None:
            kept = self._new_metadata(name)
        else:
            kept = {key: value for key, value in old["metadata"].items() if key not in _APPLIED_METADATA}
            if old["spec"] != admitted["spec"]:
                kept["generation"] += 1
        new = {**admitted, "metadata": kept | applied} | ({"status": old["status"]} if old and "status" in old else {})
        if new == old:
            return new
        stored = self._store.write(kind, name, new)
        if "ownerReferences" in applied:
            self._collect_garbage()  # an owner may have gone before its child came
        return stored

    def _put(self, resource: Resource) -> Resource:
        if resource.get("kind") != Kind.NODE:
            raise InvalidResourceError(f"only a Node is put as it is, got {resource.get('kind')!r}: use apply")
        name = name_of(resource)
        old = self._store.get(Kind.NODE, name)
        kept = self._new_metadata(name) if old is None else old["metadata"]
        server_set = {key: kept[key] for key in ("uid", "creationTimestamp", "generation", "resourceVersion") if key in kept}
        new = {**resource, "metadata": resource["metadata"] | server_set}
        return new if new == old else self._store.write(Kind.NODE, name, new)

    def _patch_status(self, kind: Kind, name: NamespacedName, status: Resource) -> bool:
        old = self._store.get(kind, name)
        if old is None:
            return False
        if kind is not Kind.NODE:
            self._admission.check_status(kind, name, status)
        if old.get("status") != status:
            self._store.write(kind, name, {**old, "status": status})
        return True

    def _delete(self, kind: Kind, name: NamespacedName) -> None:
        if self._store.remove(kind, name):
            self._collect_garbage()

    def _collect_garbage(self) -> None:
        while True:  # a child may own others
            objects = [(kind, resource) for kind in Kind for resource in self._store.list(kind)]
            uids = {resource["metadata"].get("uid") for _, resource in objects}
            orphans = [(kind, name_of(resource)) for kind, resource in objects if _is_orphan(resource, uids)]
            for kind, name in orphans:
                self._store.remove(kind, name)
            if not orphans:
                return

    def _new_metadata(self, name: NamespacedName) -> Resource:
        created = datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "name": name.name,
            "namespace": name.namespace,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": created,
            "generation": 1,
        }

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


def _placed(resource: Resource) -> NamespacedName:
    """Its name, or what admission will refuse anyway."""
    match resource.get("metadata"):
        case {"name": str(name), "namespace": str(namespace)}:
            return NamespacedName(namespace, name)
        case {"name": str(name)}:
            return NamespacedName("default", name)
        case _:
            return NamespacedName("default", "-")


def _is_orphan(resource: Resource, uids: set[str]) -> bool:
    owners = resource["metadata"].get("ownerReferences", ())
    return bool(owners) and all(owner["uid"] not in uids for owner in owners)


class _Wakeups:
    """One watcher of the revision file for all watches of a process, for as long as there are any."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._subscribers: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
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
