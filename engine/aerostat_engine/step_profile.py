"""How long steps take: prefill steps one by one, decode steps averaged, the slow first ones left out. Pure: `now` comes in."""

from __future__ import annotations

from aerostat_core.ids import Seconds
from aerostat_engine.reports import Phase, ProfilePoint, Step

WARM_UP_STEPS = 2
"""The first steps of each phase pay for allocations and lazy initialisation that never come back."""
DECODE_STEPS_PER_POINT = 16


class StepProfile:
    def __init__(self) -> None:
        self._running: tuple[Step, Seconds] | None = None
        self._seen = dict.fromkeys(Phase, 0)
        self._decode: list[tuple[Step, Seconds]] = []

    def began(self, step: Step | None, now: Seconds) -> None:
        """`step` starts now; None when nothing runs, or nothing that says something about a phase."""
        self._running = None if step is None else (step, now)

    def ended(self, now: Seconds) -> ProfilePoint | None:
        """The boundary after the step that began last. Returns a point when one is complete."""
        if self._running is None:
            return None
        step, began_at = self._running
        self._running = None
        self._seen[step.phase] += 1
        if self._seen[step.phase] <= WARM_UP_STEPS:
            return None
        if step.phase is Phase.PREFILL:
            return ProfilePoint(step=step, seconds=now - began_at)
        return self._averaged(step, now - began_at)

    def _averaged(self, step: Step, seconds: Seconds) -> ProfilePoint | None:
        """Decode steps of one batch size make one point; another size begins anew."""
        if self._decode and self._decode[0][0].n_new != step.n_new:
            self._decode.clear()
        self._decode.append((step, seconds))
        n = len(self._decode)
        if n < DECODE_STEPS_PER_POINT:
            return None
        context = sum(made.n_context for made, _ in self._decode) // n
        mean = sum(took for _, took in self._decode) / n
        self._decode.clear()
        return ProfilePoint(step=Step(phase=Phase.DECODE, n_new=step.n_new, n_context=context), seconds=mean)
