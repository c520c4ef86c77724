"""A profile is monotone where it must be, close to what was observed, and never free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.latency import WEIGHT, LatencyProfile

pytestmark = pytest.mark.cpu

TIMES = st.floats(1e-6, 100)
SIZES = st.integers(1, 200_000)
OBSERVATIONS = st.lists(st.tuples(SIZES, TIMES), min_size=1, max_size=12)


def test_nothing_costs_nothing() -> None:
    profile = LatencyProfile()
    assert profile.prefill_seconds(0) == profile.decode_seconds(0) == 0.0


@given(SIZES)
def test_an_empty_profile_answers_with_its_assumption(n: int) -> None:
    profile = LatencyProfile(assumed_prefill_per_token=0.002, assumed_decode=0.07)
    assert profile.prefill_seconds(n) == n * 0.002
    assert profile.decode_seconds(n) == 0.07


@given(SIZES, TIMES)
def test_one_observation_is_given_back(n: int, seconds: float) -> None:
    profile = LatencyProfile().observe_prefill(n, seconds).observe_decode(n, seconds)
    assert profile.prefill_seconds(n) == pytest.approx(seconds)
    assert profile.decode_seconds(1 << max(n - 1, 0).bit_length()) >= profile.decode_seconds(n) * 0.999


@given(OBSERVATIONS, SIZES)
def test_an_answer_lies_between_the_costs_that_were_seen(observations: list[tuple[int, float]], n: int) -> None:
    profile = LatencyProfile()
    for size, seconds in observations:
        profile = profile.observe_prefill(size, seconds)
    per_token = [seconds / size for size, seconds in observations]
    assert min(per_token) * n * 0.999 <= profile.prefill_seconds(n) <= max(per_token) * n * 1.001


@given(st.floats(1e-6, 1e-2), st.lists(SIZES, min_size=1, max_size=8), SIZES)
def test_a_machine_of_constant_cost_is_learned_exactly(cost: float, sizes: list[int], n: int) -> None:
    profile = LatencyProfile()
    for size in sizes:
        profile = profile.observe_prefill(size, size * cost)
    assert profile.prefill_seconds(n) == pytest.approx(n * cost)


@given(TIMES, TIMES)
def test_a_new_observation_moves_the_average_by_its_weight(old: float, new: float) -> None:
    profile = LatencyProfile().observe_decode(8, old).observe_decode(8, new)
    assert profile.decode_seconds(8) == pytest.approx(old + WEIGHT * (new - old))


@given(OBSERVATIONS, SIZES)
def test_no_batch_is_cheaper_than_the_smallest_known(observations: list[tuple[int, float]], n: int) -> None:
    """A smaller batch than any known costs what that one costs: a step reads all weights however few sequences it has."""
    profile = LatencyProfile()
    for size, seconds in observations:
        profile = profile.observe_decode(size, seconds)
    smallest = min(profile.decode)
    assert profile.decode_seconds(1) == profile.decode[smallest]
    assert profile.decode_seconds(n) >= min(profile.decode.values()) * 0.999


def test_an_observation_leaves_the_profile_that_it_was_made_on() -> None:
    first = LatencyProfile()
    first.observe_prefill(100, 1.0)
    assert first == LatencyProfile()


@pytest.mark.parametrize(("n", "seconds"), [(0, 1.0), (-1, 1.0), (1, -0.1)])
def test_an_impossible_observation_is_refused(n: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="n >= 1 and seconds >= 0"):
        LatencyProfile().observe_prefill(n, seconds)
    with pytest.raises(ValueError, match="n >= 1 and seconds >= 0"):
        LatencyProfile().observe_decode(n, seconds)
