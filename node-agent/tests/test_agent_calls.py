"""Percentile and attainment of recent calls: nearest rank, both targets, ten minutes, a bound."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_agent.policy.figures import CALL_WINDOW, MAX_CALLS, CallTimes, RecentCalls
from aerostat_core.specs import SloTargets

pytestmark = pytest.mark.cpu

SLO = SloTargets(ttft=1.0, tpot=0.1, hold_budget=10.0)


def call(ttft: float, tpot: float | None = 0.05) -> CallTimes:
    return CallTimes(ttft=ttft, tpot=tpot)


def test_of_no_calls_nothing_is_said() -> None:
    calls = RecentCalls()
    assert calls.ttft_p95(0.0) is None
    assert calls.attainment(SLO, 0.0) is None


def test_the_percentile_is_a_measured_value_by_nearest_rank() -> None:
    calls = RecentCalls()
    for i in range(1, 101):
        calls.add(call(float(i)), 0.0)
    assert calls.ttft_p95(0.0) == 95.0
    calls.add(call(1000.0), 0.0)
    assert calls.ttft_p95(0.0) == 96.0
    single = RecentCalls()
    single.add(call(7.0), 0.0)
    assert single.ttft_p95(0.0) == 7.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_at_least_95_percent_do_not_exceed_the_percentile_and_no_smaller_value_does(ttfts: list[float]) -> None:
    calls = RecentCalls()
    for ttft in ttfts:
        calls.add(call(ttft), 0.0)
    p95 = calls.ttft_p95(0.0)
    assert p95 in ttfts
    enough = math.ceil(len(ttfts) * 95 / 100)
    assert sum(ttft <= p95 for ttft in ttfts) >= enough
    assert sum(ttft < p95 for ttft in ttfts) < enough


@pytest.mark.parametrize(
    ("ttft", "tpot", "is_met"),
    [(1.0, 0.1, True), (1.01, 0.1, False), (1.0, 0.11, False), (0.5, None, True), (2.0, None, False)],
)
def test_a_call_meets_its_slo_when_it_meets_both_targets(ttft: float, tpot: float | None, is_met: bool) -> None:
    calls = RecentCalls()
    calls.add(call(ttft, tpot), 0.0)
    assert calls.attainment(SLO, 0.0) == float(is_met)
    calls.add(call(0.0, 0.0), 0.0)
    assert calls.attainment(SLO, 0.0) == (1 + is_met) / 2


def test_the_pace_is_that_of_the_tokens_after_the_first() -> None:
    assert CallTimes.of(first_token=0.5, total=1.5, n_output_tokens=11).tpot == pytest.approx(0.1)
    assert CallTimes.of(first_token=0.5, total=0.5, n_output_tokens=1).tpot is None


def test_calls_are_forgotten_after_ten_minutes_and_beyond_the_bound() -> None:
    calls = RecentCalls()
    calls.add(call(9.0), 0.0)
    calls.add(call(1.0), 300.0)
    assert calls.ttft_p95(CALL_WINDOW - 1) == 9.0
    assert calls.ttft_p95(CALL_WINDOW) == 1.0
    assert calls.ttft_p95(CALL_WINDOW + 300) is None
    calls.add(call(9.0), 1000.0)
    for _ in range(MAX_CALLS):
        calls.add(call(1.0), 1000.0)
    assert calls.attainment(SLO, 1000.0) == 1.0
