"""What this router saw of each model in the last window: arrivals, held and spilled calls.

Each router reports its counts to the agents, telemetry carries the sums back; otherwise n replicas would each see a part.
"""

from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from aerostat_core.defaults import DEMAND_WINDOW
from aerostat_core.ids import NamespacedName, Seconds


class Sight(IntEnum):
    ARRIVAL = 0
    HELD = 1
    SPILLED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    model: NamespacedName
    arrivals: int
    held: int
    spilled: int


class DemandWindow:
    """Counts in steps of a tenth of the window, so that noting a call is one addition. Mutable; time never goes back."""

    N_STEPS = 10

    def __init__(self, window: Seconds = DEMAND_WINDOW) -> None:
        self._step = window / self.N_STEPS
        self.window = window
        self._steps: deque[tuple[int, dict[NamespacedName, list[int]]]] = deque()

    def note(self, model: NamespacedName, sight: Sight, now: Seconds) -> None:
        step = int(now / self._step)
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append((step, {}))
            self._forget(step)
        counts = self._steps[-1][1].get(model)
        if counts is None:
            counts = self._steps[-1][1][model] = [0, 0, 0]
        counts[sight] += 1

    def report(self, now: Seconds) -> tuple[Demand, ...]:
        """Sums over the window that ends now, by model name; models without a call are left out."""
        self._forget(int(now / self._step))
        sums: dict[NamespacedName, list[int]] = {}
        for _, models in self._steps:
            for model, counts in models.items():
                total = sums.setdefault(model, [0, 0, 0])
                for i, n in enumerate(counts):
                    total[i] += n
        return tuple(Demand(model=m, arrivals=n[0], held=n[1], spilled=n[2]) for m, n in sorted(sums.items()))

    def arrivals(self, model: NamespacedName, now: Seconds) -> int:
        self._forget(int(now / self._step))
        return sum(models[model][Sight.ARRIVAL] for _, models in self._steps if model in models)

    def _forget(self, step: int) -> None:
        while self._steps and self._steps[0][0] <= step - self.N_STEPS:
            self._steps.popleft()
