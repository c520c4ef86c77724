"""Epochs of processes: each higher than any before, over restarts of the agent too."""

from aerostat_core.clock import Clock
from aerostat_core.ids import Epoch


class EpochSource:
    """Wall-clock milliseconds, or one more than the last: a clock that was set back gives no old epoch again."""

    def __init__(self, clock: Clock, last_seen: Epoch) -> None:
        self._clock = clock
        self._last = last_seen

    def __call__(self) -> Epoch:
        self._last = Epoch(max(self._last + 1, int(self._clock.wall() * 1000)))
        return self._last
