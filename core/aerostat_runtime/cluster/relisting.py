"""A watch over what can be listed and says that something changed: list again, compare, tell the differences.

Changes that coalesce on the way cost events between, never the last state.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.cluster.differences import differences
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent

NextWakeup = Callable[[], Awaitable[bool]]
"""Waits for the next change since it returned last, or since it was subscribed; False: there will be none, the watch ends."""


async def watch_by_listing(
    kind: Kind, list_: Callable[[Kind], Awaitable[list[Resource]]], subscribe: Callable[[], AbstractAsyncContextManager[NextWakeup]]
) -> AsyncGenerator[WatchEvent, None]:
    """As the port says."""
    seen: dict[NamespacedName, Resource] = {}
    synced = False
    async with subscribe() as next_wakeup:
        while True:
            present = {name_of(resource): resource for resource in await list_(kind)}
            for event in differences(kind, seen, present):
                yield event
            seen = present
            if not synced:
                synced = True
                yield WatchEvent(Change.SYNCED, kind, None)
            if not await next_wakeup():
                return
