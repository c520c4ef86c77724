"""`Cluster` in memory, for tests: as strict as the folder and without files, threads or time of its own.

So it works under virtual time. Its objects live as long as the test, and in one process.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

import orjson

from aerostat_core.clock import Clock
from aerostat_core.errors import PermanentError
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.port import Kind, Note, WatchEvent
from aerostat_runtime.cluster.relisting import NextWakeup, watch_by_listing
from aerostat_runtime.cluster.writes import Writes


class MemoryObjects:
    """What etcd is to an API server. Objects are kept as JSON, so nobody holds a part of one."""

    def __init__(self) -> None:
        self.revision = 0
        self.watchers: set[asyncio.Event] = set()  # set when something changed
        self._stored: dict[Kind, dict[NamespacedName, bytes]] = {kind: {} for kind in Kind}

    def list(self, kind: Kind) -> list[Resource]:
        return [orjson.loads(text) for _, text in sorted(self._stored[kind].items())]

    def get(self, kind: Kind, name: NamespacedName) -> Resource | None:
        text = self._stored[kind].get(name)
        return None if text is None else orjson.loads(text)

    def write(self, kind: Kind, name: NamespacedName, resource: Resource) -> Resource:
        metadata = {**resource["metadata"], "resourceVersion": str(self.revision + 1)}
        text = orjson.dumps({**resource, "metadata": metadata})
        self._stored[kind][name] = text
        self._changed()
        stored: Resource = orjson.loads(text)
        return stored

    def remove(self, kind: Kind, name: NamespacedName) -> bool:
        if self._stored[kind].pop(name, None) is None:
            return False
        self._changed()
        return True

    def _changed(self) -> None:
        self.revision += 1
        for watcher in self.watchers:
            watcher.set()


class MemoryCluster:
    """One opening of `objects`. Each call lets others run first, as one that waits for a disk or a server does."""

    def __init__(self, *resources: Resource, objects: MemoryObjects | None = None, clock: Clock | None = None) -> None:
        """`resources` are applied; those that have a status get it."""
        self.notes: list[Note] = []
        self.secrets: dict[NamespacedName, Mapping[str, bytes]] = {}
        self.objects = objects if objects is not None else MemoryObjects()
        self._writes = Writes(self.objects, Admission.of_this_build(), clock or SystemClock())
        self._is_closed = False
        for resource in resources:
            self._writes.apply(resource)
            if "status" in resource:
                self._writes.patch_status(Kind(resource["kind"]), name_of(resource), resource["status"])

    async def list(self, kind: Kind) -> list[Resource]:
        await asyncio.sleep(0)
        return self.objects.list(kind)

    def watch(self, kind: Kind) -> AsyncGenerator[WatchEvent, None]:
        return watch_by_listing(kind, self.list, self._wakeups)

    async def apply(self, resource: Resource) -> Resource:
        await asyncio.sleep(0)
        return self._writes.apply(resource)

    async def patch_status(self, kind: Kind, name: NamespacedName, status: Resource) -> bool:
        await asyncio.sleep(0)
        return self._writes.patch_status(kind, name, status)

    async def delete(self, kind: Kind, name: NamespacedName) -> None:
        await asyncio.sleep(0)
        self._writes.delete(kind, name)

    async def note(self, note: Note) -> None:
        await asyncio.sleep(0)
        self.notes.append(note)

    async def secret(self, name: NamespacedName) -> Mapping[str, bytes]:
        await asyncio.sleep(0)
        if name not in self.secrets:
            raise PermanentError("SecretNotFound", f'there is no Secret "{name.name}" in namespace "{name.namespace}": create it')
        return self.secrets[name]

    async def close(self) -> None:
        """Ends all watches."""
        self._is_closed = True
        for watcher in self.objects.watchers:
            watcher.set()

    @asynccontextmanager
    async def _wakeups(self) -> AsyncIterator[NextWakeup]:
        changed = asyncio.Event()

        async def next_wakeup() -> bool:
            if not self._is_closed:
                await changed.wait()
                changed.clear()
            return not self._is_closed

        self.objects.watchers.add(changed)
        try:
            yield next_wakeup
        finally:
            self.objects.watchers.discard(changed)
