"""Keys of objects that changed, taken together: a burst of events is one run."""

import asyncio

from aerostat_core.clock import Clock
from aerostat_core.ids import Seconds
from aerostat_operator.mirror import Key

COALESCE: Seconds = 0.05  # what arrives this soon after the first belongs to the same run


class WorkQueue:
    """Handlers and watchers only `add`; one worker takes. `wake_in` asks for a run without a key (a retry, a resync)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._dirty: set[Key] = set()
        self._due: Seconds | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that wait."""
        return len(self._dirty)

    def add(self, key: Key) -> None:
        self._dirty.add(key)
        self._changed.set()

    def wake_in(self, seconds: Seconds) -> None:
        """The earliest of all such requests counts."""
        due = self._clock.monotonic() + seconds
        self._due = due if self._due is None else min(self._due, due)
        self._changed.set()

    def close(self) -> None:
        """No more is given out; whoever waits is told at once."""
        self._closed = True
        self._changed.set()

    async def take(self) -> frozenset[Key] | None:
        """Waits for a change or a due time. The keys since the last take (none: it was time), or None once closed."""
        while not self._closed and not self._dirty and not self._is_due():
            self._changed.clear()
            wait = None if self._due is None else max(self._due - self._clock.monotonic(), 0.0)
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue
        if self._dirty and not self._closed:
            await asyncio.sleep(COALESCE)
        if self._closed:
            return None
        if self._is_due():
            self._due = None
        taken, self._dirty = frozenset(self._dirty), set()
        return taken

    def _is_due(self) -> bool:
        return self._due is not None and self._clock.monotonic() >= self._due
