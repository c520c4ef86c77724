"""Profile points: no warm-up, prefill one by one, decode averaged by batch size."""

from __future__ import annotations

import pytest

from aerostat_engine.reports import Phase, ProfilePoint, Step
from aerostat_engine.step_profile import DECODE_STEPS_PER_POINT, WARM_UP_STEPS, StepProfile

pytestmark = pytest.mark.cpu


def prefill(n_new: int) -> Step:
    return Step(phase=Phase.PREFILL, n_new=n_new, n_context=n_new)


def decode(batch: int, context: int = 100) -> Step:
    return Step(phase=Phase.DECODE, n_new=batch, n_context=context)


def run(profile: StepProfile, step: Step, seconds: float) -> ProfilePoint | None:
    profile.began(step, 10.0)
    return profile.ended(10.0 + seconds)


def test_the_first_steps_of_each_phase_are_left_out() -> None:
    profile = StepProfile()
    for _ in range(WARM_UP_STEPS):
        assert run(profile, prefill(64), 9.0) is None
    assert run(profile, prefill(64), 0.5) == ProfilePoint(step=prefill(64), seconds=0.5)


def test_decode_steps_of_one_batch_size_are_averaged() -> None:
    profile = StepProfile()
    made = [run(profile, decode(4, context=100 + i), 0.25 + 0.5 * (i % 2)) for i in range(WARM_UP_STEPS + DECODE_STEPS_PER_POINT)]
    assert made[:-1] == [None] * (len(made) - 1)
    point = made[-1]
    assert point is not None
    assert point.step.n_new == 4
    assert point.seconds == pytest.approx(0.5)
    assert 100 < point.step.n_context < 120


def test_another_batch_size_begins_a_new_average() -> None:
    profile = StepProfile()
    for _ in range(WARM_UP_STEPS + DECODE_STEPS_PER_POINT - 1):
        assert run(profile, decode(4), 1.0) is None
    assert run(profile, decode(5), 1.0) is None
    assert run(profile, decode(4), 1.0) is None


def test_idle_time_between_batches_is_no_step() -> None:
    profile = StepProfile()
    profile.began(prefill(8), 0.0)
    profile.ended(1.0)
    profile.began(None, 1.0)
    assert profile.ended(100.0) is None
