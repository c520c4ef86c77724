"""What is measured of a model on an instance and outlives its processes: latencies, rates, the cost of a start."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from aerostat_core.ids import Seconds
from aerostat_core.latency import WEIGHT, LatencyProfile
from aerostat_core.specs import SloTargets

RATE_WINDOW: Final[Seconds] = 60.0
_RATE_STEP: Final[Seconds] = 1.0
CALL_WINDOW: Final[Seconds] = 600.0
MAX_CALLS: Final = 4096
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes:
    """One call inside the engine. `tpot`: seconds for each token after the first, None for a call of one token."""

    ttft: Seconds
    tpot: Seconds | None

    @classmethod
    def of(cls, *, first_token: Seconds, total: Seconds, n_output_tokens: int) -> "CallTimes":
        tpot = max(total - first_token, 0.0) / (n_output_tokens - 1) if n_output_tokens > 1 else None
        return cls(ttft=first_token, tpot=tpot)

    def meets(self, slo: SloTargets) -> bool:
        return self.ttft <= slo.ttft and (self.tpot is None or self.tpot <= slo.tpot)


@dataclass(slots=True)
class RecentCalls:
    """Calls of the last 10 minutes, at most 4,096 of them. Mutable. Figures of no calls are None."""

    _calls: deque[tuple[Seconds, CallTimes]] = field(default_factory=lambda: deque(maxlen=MAX_CALLS))

    def add(self, call: CallTimes, now: Seconds) -> None:
        self._calls.append((now, call))
        self._drop(now)

    def ttft_p95(self, now: Seconds) -> Seconds | None:
        """Nearest rank: the smallest measured value that at least 95 % of the calls do not exceed."""
        self._drop(now)
        ordered = sorted(call.ttft for _, call in self._calls)
        return ordered[math.ceil(len(ordered) * 95 / 100) - 1] if ordered else None

    def attainment(self, slo: SloTargets, now: Seconds) -> float | None:
        """Share of the calls that met both targets as they are now."""
        self._drop(now)
        return sum(call.meets(slo) for _, call in self._calls) / len(self._calls) if self._calls else None

    def _drop(self, now: Seconds) -> None:
        while self._calls and self._calls[0][0] <= now - CALL_WINDOW:
            self._calls.popleft()


@dataclass(slots=True)
class Figures:
    """Mutable. `open_seconds` is an EWMA of starts, from the process's start to the token probe passed."""

    profile: LatencyProfile = field(default_factory=LatencyProfile)
    open_seconds: Seconds = ASSUMED_START
    n_opened: int = 0
    n_failed: int = 0
    requests: Rate = field(default_factory=Rate)
    tokens: Rate = field(default_factory=Rate)
    calls: RecentCalls = field(default_factory=RecentCalls)

    def opened(self, took: Seconds) -> None:
        self.open_seconds = took if not self.n_opened else self.open_seconds + WEIGHT * (took - self.open_seconds)
        self.n_opened += 1

    def queue_seconds(self, *, running: int, waiting_tokens: int) -> Seconds:
        """Predicted wait of a call that arrives now: the step in flight, then the prefill of what waits before it."""
        return self.profile.decode_seconds(running) + self.profile.prefill_seconds(waiting_tokens) if running or waiting_tokens else 0.0
