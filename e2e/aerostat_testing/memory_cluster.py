"""A `Cluster` in memory for tests that need declared objects and nothing of the folder or an API server. It validates nothing."""

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.cluster.port import Change, Kind, Note, WatchEvent


class MemoryCluster:
    def __init__(self, *resources: Resource) -> None:
        self.notes: list[Note] = []
        self._objects: dict[tuple[Kind, NamespacedName], Resource] = {}
        self._watchers: list[tuple[Kind, asyncio.Queue[WatchEvent]]] = []
        for resource in resources:
            self._objects[Kind(resource["kind"]), name_of(resource)] = resource

    async def list(self, kind: Kind) -> list[Resource]:
        return [copy.deepcopy(r) for (k, _), r in self._objects.items() if k is kind]

    async def watch(self, kind: Kind) -> AsyncIterator[WatchEvent]:
        queue: asyncio.Queue[WatchEvent] = asyncio.Queue()
        self._watchers.append((kind, queue))
        for resource in await self.list(kind):
            yield WatchEvent(Change.ADDED, kind, resource)
        yield WatchEvent(Change.SYNCED, kind, None)
        while True:
            yield await queue.get()

    async def apply(self, resource: Resource) -> Resource:
        key = (Kind(resource["kind"]), name_of(resource))
        known = self._objects.get(key)
        merged = {**resource, "status": known["status"]} if known is not None and "status" in known else resource
        self._objects[key] = merged
        self._tell(Change.MODIFIED if known is not None else Change.ADDED, key[0], merged)
        return copy.deepcopy(merged)

    async def patch_status(self, kind: Kind, name: NamespacedName, status: dict[str, Any]) -> bool:
        known = self._objects.get((kind, name))
        if known is None:
            return False
        self._objects[kind, name] = {**known, "status": status}
        self._tell(Change.MODIFIED, kind, self._objects[kind, name])
        return True

    async def delete(self, kind: Kind, name: NamespacedName) -> None:
        known = self._objects.pop((kind, name), None)
        if known is not None:
            self._tell(Change.DELETED, kind, known)

    async def note(self, note: Note) -> None:
        self.notes.append(note)

    async def close(self) -> None:
        pass

    def _tell(self, change: Change, kind: Kind, resource: Resource) -> None:
        for watched, queue in self._watchers:
            if watched is kind:
                queue.put_nowait(WatchEvent(change, kind, copy.deepcopy(resource)))
