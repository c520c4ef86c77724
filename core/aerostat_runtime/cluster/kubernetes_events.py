"""Notes as Kubernetes Events (events.k8s.io/v1): what `kubectl describe` shows below an object.

An event's name is made from what it says, so that whoever says it again, after a restart or in another replica, counts
on instead of adding one. The server forgets events after an hour.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Final

from aerostat_core.clock import Clock
from aerostat_core.errors import AerostatError
from aerostat_core.ids import Seconds
from aerostat_core.resources import Resource
from aerostat_runtime.cluster.kubernetes_connection import Api, Request
from aerostat_runtime.cluster.kubernetes_errors import AlreadyExistsError, NotFoundError
from aerostat_runtime.cluster.kubernetes_paths import PLURALS, api_version, item
from aerostat_runtime.cluster.port import Kind, Note

NOTE_LIMIT: Final[Seconds] = 5.0
REPEAT_AFTER: Final[Seconds] = 60.0  # the same note sooner than this is counted only, and told with the next
_N_REMEMBERED: Final = 1024
_MAX_TEXT: Final = 1024  # bytes that the API takes
_log = logging.getLogger(__name__)


class EventRecorder:
    def __init__(self, api: Api, clock: Clock, *, component: str, instance: str) -> None:
        self._api, self._clock = api, clock
        self._component, self._instance = component, instance
        self._told: OrderedDict[Note, tuple[Seconds, int]] = OrderedDict()  # when, and how often since

    async def record(self, note: Note) -> None:
        """Takes at most NOTE_LIMIT, and raises nothing."""
        now = self._clock.monotonic()
        told_at, n_untold = self._told.get(note, (None, 0))
        if told_at is not None and now - told_at < REPEAT_AFTER:
            self._told[note] = (told_at, n_untold + 1)
            return
        self._told[note] = (now, 0)
        self._told.move_to_end(note)
        if len(self._told) > _N_REMEMBERED:
            self._told.popitem(last=False)
        try:
            async with asyncio.timeout(NOTE_LIMIT):
                await self._send(note, n_untold + 1)
        except (AerostatError, TimeoutError) as error:
            _log.warning("event %s of %s %s not recorded: %s", note.reason, note.kind, note.name, error)

    async def _send(self, note: Note, n_times: int) -> None:
        event = self._event(note, await self._uid_of(note))
        namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        try:
            await self._api.once(Request(what="create events.events.k8s.io", method="POST", path=path, body=event))
        except AlreadyExistsError:
            before = await self._api.once(Request(what="get events.events.k8s.io", method="GET", path=f"{path}/{name}"))
            count = (before.get("series") or {}).get("count", 1) + n_times
            series = {"series": {"count": count, "lastObservedTime": event["eventTime"]}}
            await self._api.once(
                Request(
                    what="patch events.events.k8s.io",
                    method="PATCH",
                    path=f"{path}/{name}",
                    body=series,
                    content_type="application/merge-patch+json",
                )
            )

    async def _uid_of(self, note: Note) -> str:
        """Empty when it is gone: the event is told all the same."""
        request = Request(what=f"get {PLURALS[note.kind]}", method="GET", path=item(note.kind, note.name))
        try:
            return str((await self._api.once(request))["metadata"]["uid"])
        except NotFoundError:
            return ""

    def _event(self, note: Note, uid: str) -> Resource:
        identity = "\0".join((uid, note.kind, str(note.name), note.reason, note.message, str(note.warning), self._component))
        regarding = {"apiVersion": api_version(note.kind), "kind": note.kind.value, "name": note.name.name, "uid": uid}
        if note.kind is not Kind.NODE:
            regarding["namespace"] = note.name.namespace
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "namespace": note.name.namespace,
                "name": f"{note.name.name[:200]}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}",
            },
            "eventTime": datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "type": "Warning" if note.warning else "Normal",
            "reason": note.reason[:128],
            "action": note.reason[:128],
            "note": _shortened(note.message),
            "regarding": regarding,
            "reportingController": f"aerostat.dev/{self._component}",
            "reportingInstance": self._instance[:128],
        }


def _shortened(text: str) -> str:
    data, end = text.encode(), "…"
    return text if len(data) <= _MAX_TEXT else data[: _MAX_TEXT - len(end.encode())].decode(errors="ignore") + end
