"""List, then watch, for ever: through outages, expired versions and servers that come back with another memory.

Whenever it is unsure whether it missed something, it lists again and tells the difference, deletions included.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from aerostat_core.errors import AerostatError, PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.cluster.differences import differences, is_same
from aerostat_runtime.cluster.kubernetes_connection import Api, Backoff, Request
from aerostat_runtime.cluster.kubernetes_errors import ExpiredError, UnreachableError, error_of
from aerostat_runtime.cluster.kubernetes_paths import PLURALS, collection, kept
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent

PAGE: Final = 500  # objects in one answer of a list
_LIST_TRIES: Final = 3  # a list whose later pages expired starts anew
_WATCH_SECONDS: Final = (240, 480)  # for which a server is asked to keep one; spread, so that they do not end at once
_STEADY: Final[Seconds] = 30.0  # a watch that lived for so long was a good one
_log = logging.getLogger(__name__)


class Mirror:
    """What a watch has told so far, and so what is news."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.present: dict[NamespacedName, Resource] = {}

    def listed(self, resources: list[Resource]) -> list[WatchEvent]:
        """All that exists now."""
        now = {name_of(resource): resource for resource in resources}
        events = list(differences(self._kind, self.present, now))
        self.present = now
        return events

    def told(self, resource: Resource, *, deleted: bool) -> list[WatchEvent]:
        """One event of a server's watch."""
        name = name_of(resource)
        before = self.present.get(name)
        if not deleted:
            self.present[name] = resource
            return list(differences(self._kind, {} if before is None else {name: before}, {name: resource}))
        if before is None or not is_same(before, resource):
            return []
        del self.present[name]
        return [WatchEvent(Change.DELETED, self._kind, resource)]


class Watch:
    def __init__(self, api: Api, kind: Kind, namespace: str | None) -> None:
        self._api, self._kind = api, kind
        self._path = collection(kind, namespace)
        self._mirror = Mirror(kind)
        self._version = ""
        self._backoff = Backoff()
        self._is_away = False

    async def events(self) -> AsyncGenerator[WatchEvent, None]:
        """Raises PermanentError before SYNCED only: what worked once is waited for, whatever the server says meanwhile."""
        synced = False
        while True:
            try:
                resources, self._version = await list_all(self._api, self._kind, self._path, patient=not synced)
            except TemporaryError as error:
                await self._pause(error)
                continue
            except PermanentError as error:
                if not synced:
                    raise
                await self._pause(error)
                continue
            self._is_back()
            for event in self._mirror.listed(resources):
                yield event
            if not synced:
                synced = True
                yield WatchEvent(Change.SYNCED, self._kind, None)
            async with aclosing(self._changes()) as changes:
                async for event in changes:
                    yield event

    async def _changes(self) -> AsyncGenerator[WatchEvent, None]:
        """From the version that is known. Ends where only a list can tell what changed."""
        while True:
            began = asyncio.get_running_loop().time()
            failure: AerostatError | None = None
            try:
                async with aclosing(self._api.stream(self._request())) as stream:
                    async for told in stream:
                        for event in self._read(told):
                            yield event
            except ExpiredError:
                return
            except AerostatError as error:
                failure = error
            if asyncio.get_running_loop().time() - began > _STEADY:
                self._backoff.reset()
            await self._pause(failure)
            if failure is not None and not isinstance(failure, UnreachableError):
                return

    def _request(self) -> Request:
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(random.randint(*_WATCH_SECONDS)),
        }
        return Request(what=f"watch {PLURALS[self._kind]}", method="GET", path=self._path, query=query)

    def _read(self, told: Resource) -> list[WatchEvent]:
        change, resource = told["type"], told["object"]
        if change == "ERROR":
            raise error_of(int(resource.get("code", 500)), resource, what=f"watch {PLURALS[self._kind]}")
        self._is_back()
        self._version = resource["metadata"]["resourceVersion"]
        return [] if change == "BOOKMARK" else self._mirror.told(kept(self._kind, resource), deleted=change == "DELETED")

    async def _pause(self, failure: AerostatError | None) -> None:
        if failure is not None and not self._is_away:
            self._is_away = True
            _log.warning("watch of %s: %s; what is known stays, and it is tried again", PLURALS[self._kind], failure)
        asked = failure.asked if isinstance(failure, UnreachableError) else 0.0
        await asyncio.sleep(self._backoff.next(at_least=asked))

    def _is_back(self) -> None:
        if self._is_away:
            self._is_away = False
            _log.info("watch of %s goes on", PLURALS[self._kind])


async def list_all(api: Api, kind: Kind, path: str, *, patient: bool = False) -> tuple[list[Resource], str]:
    """All objects by namespace and name, and the version to watch from. `patient`: each page with retries."""
    for _ in range(_LIST_TRIES):
        try:
            resources, version = await _pages(api, kind, path, patient)
        except ExpiredError:
            continue
        return sorted(resources, key=name_of), version
    raise TemporaryError("Expired", f"cannot list {PLURALS[kind]}: they change faster than they are read", retry_after=1.0)


async def _pages(api: Api, kind: Kind, path: str, patient: bool) -> tuple[list[Resource], str]:
    resources: list[Resource] = []
    query = {"limit": str(PAGE)}
    while True:
        request = Request(what=f"list {PLURALS[kind]}", method="GET", path=path, query=query)
        answer = await (api.call(request) if patient else api.once(request))
        resources += [kept(kind, resource) for resource in answer["items"]]
        more = answer["metadata"].get("continue")
        if not more:
            return resources, answer["metadata"]["resourceVersion"]
        query = {"limit": str(PAGE), "continue": more}
