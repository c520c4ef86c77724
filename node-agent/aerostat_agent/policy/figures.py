"""What is measured of a model on an instance and outlives its processes: latencies, rates, the cost of a start."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from aerostat_core.ids import Seconds
from aerostat_core.latency import WEIGHT, LatencyProfile

RATE_WINDOW: Final[Seconds] = 60.0
_RATE_STEP: Final[Seconds] = 1.0
ASSUMED_START: Final[Seconds] = 30.0  # until one was measured here


@dataclass(slots=True)
class Rate:
    """Amount per second over the last 60 s, kept by the second. Mutable."""

    _steps: deque[tuple[Seconds, float]] = field(default_factory=deque)

    def add(self, amount: float, now: Seconds) -> None:
        step = now // _RATE_STEP * _RATE_STEP
        if self._steps and self._steps[-1][0] == step:
            self._steps[-1] = (step, self._steps[-1][1] + amount)
        else:
            self._steps.append((step, amount))
        self._drop(now)

    def per_second(self, now: Seconds) -> float:
        self._drop(now)
        return sum(amount for _, amount in self._steps) / RATE_WINDOW

    def _drop(self, now: Seconds) -> None:
        while self._steps and self._steps[0][0] <= now - RATE_WINDOW:
            self._steps.popleft()


@dataclass(slots=True)
class Figures:
    """Mutable. `open_seconds` is an EWMA of starts, from the process's start to the token probe passed."""

    profile: LatencyProfile = field(default_factory=LatencyProfile)
    open_seconds: Seconds = ASSUMED_START
    n_opened: int = 0
    n_failed: int = 0
    requests: Rate = field(default_factory=Rate)
    tokens: Rate = field(default_factory=Rate)

    def opened(self, took: Seconds) -> None:
        self.open_seconds = took if not self.n_opened else self.open_seconds + WEIGHT * (took - self.open_seconds)
        self.n_opened += 1

    def queue_seconds(self, *, running: int, waiting_tokens: int) -> Seconds:
        """Predicted wait of a call that arrives now: the step in flight, then the prefill of what waits before it."""
        return self.profile.decode_seconds(running) + self.profile.prefill_seconds(waiting_tokens) if running or waiting_tokens else 0.0
