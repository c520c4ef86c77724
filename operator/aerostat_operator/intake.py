"""What is known of the cluster, and how it is kept true: events tell at once, a list tells surely.

kopf's watches do not tell what was deleted while a watch was broken, and one that fails for another reason than an old
version ends without a word (decision note `kopf-events-and-sweeps`). So a sweep lists everything from time to time; what
it found and no watch tells soon after means that a watch is deaf.
"""

import asyncio
from typing import Final

from aerostat_core.clock import Clock
from aerostat_core.ids import Seconds
from aerostat_core.resources import name_of
from aerostat_operator.mirror import Key, Mirror
from aerostat_operator.work_queue import WorkQueue
from aerostat_runtime.cluster.port import Change, Cluster, Kind, WatchEvent

GRACE: Final[Seconds] = 5.0  # for a watch to tell what a list has told already


class Intake:
    """Feeds a mirror and a queue. Not thread-safe: call it from the loop of the worker."""

    def __init__(self, cluster: Cluster, clock: Clock, mirror: Mirror, queue: WorkQueue) -> None:
        self._cluster, self._clock = cluster, clock
        self._mirror, self._queue = mirror, queue
        self._sweeping = asyncio.Lock()
        self._untold: dict[Key, tuple[Seconds, str | None]] = {}  # listed when, in which version (None: it is gone)

    def observe(self, event: WatchEvent) -> None:
        """An event of a watch."""
        told = self._mirror.observe(event)
        if told is not None:
            self._queue.add(told)
        if event.resource is not None:
            self._confirm(event)

    async def sweep(self) -> int:
        """List every kind. How many objects are different from what the watches had told. Raises what a list raises."""
        n_changed = 0
        async with self._sweeping:
            for kind in Kind:
                with self._mirror.listing(kind) as take:
                    changed = take(await self._cluster.list(kind))
                now = self._clock.monotonic()
                for key in changed:
                    self._queue.add(key)
                    self._untold[key] = (now, self._mirror.version_of(key))
                n_changed += len(changed)
        return n_changed

    def forget_untold(self) -> None:
        """Watches begin anew and tell everything that there is."""
        self._untold.clear()

    def untold(self) -> list[Key]:
        """What a sweep found and no watch has told in time."""
        now = self._clock.monotonic()
        return [key for key, (found_at, _) in self._untold.items() if now - found_at >= GRACE]

    def _confirm(self, event: WatchEvent) -> None:
        assert event.resource is not None, "the end of a list confirms nothing"
        key = (event.kind, name_of(event.resource))
        if key not in self._untold:
            return
        _, version = self._untold[key]
        told = int(event.resource["metadata"]["resourceVersion"])
        if event.change is Change.DELETED if version is None else told >= int(version):
            del self._untold[key]
