"""Whether the batch that runs has run for too long. Told by the scheduler's thread, asked by the link's. Pure: `now` comes in.

A scheduler that hangs cannot say so itself. An idle or a held one is not concerned: only a batch that began and does not end.
"""

from __future__ import annotations

from aerostat_core.ids import Seconds


class StallWatch:
    """One reference is written and read at a time, so that two threads may share it."""

    def __init__(self, *, limit: Seconds) -> None:
        self._limit = limit
        self._running: tuple[int, Seconds] | None = None

    def began(self, n_requests: int, now: Seconds) -> None:
        self._running = (n_requests, now)

    def ended(self) -> None:
        self._running = None

    def trouble(self, now: Seconds) -> str | None:
        """What is wrong, in words for people; None while all is well."""
        running = self._running
        if running is None or now - running[1] < self._limit:
            return None
        n_requests, began_at = running
        return f"a batch of {n_requests} requests has run for {now - began_at:.0f} s, {self._limit:.0f} s are allowed: the scheduler hangs"
