"""One timer for all connections: a waiter states its deadline in an attribute, a sweep per tick finds those that have passed.

Arming a deadline costs one attribute write, where a timer of the loop costs a microsecond to set and one to cancel, twice a request.
The price is that a deadline fires up to one tick late.
"""

import asyncio
import math
from typing import Protocol

NEVER = math.inf


class Waiter(Protocol):
    """`deadline` is in the loop's time; NEVER while there is nothing to wait for."""

    deadline: float

    def on_deadline(self) -> None:
        """Called once per sweep while the deadline lies in the past; the waiter moves it, or ends itself."""
        ...


class Deadlines:
    """Sweeps only while somebody is registered, so that an idle loop has no timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tick_s: float) -> None:
        self._loop = loop
        self._tick_s = tick_s
        self._waiters: set[Waiter] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, waiter: Waiter) -> None:
        self._waiters.add(waiter)
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._sweep)

    def discard(self, waiter: Waiter) -> None:
        self._waiters.discard(waiter)
        if not self._waiters and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._sweep)
        now = self._loop.time()
        for waiter in [w for w in self._waiters if w.deadline <= now]:
            waiter.on_deadline()
