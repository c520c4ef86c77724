"""The memory check: what fits, and what a refusal says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_agent.policy.memory import MIN_SLACK_SHARE, Footprint, kv_tokens, memory_price, refuse, used_bytes

pytestmark = pytest.mark.cpu

size = st.integers(0, 1 << 40)
footprint = st.builds(Footprint, weights=size, reserve=size, kv=size)


@given(footprint, st.lists(footprint, max_size=5), size)
def test_what_is_not_refused_fits_and_what_is_refused_does_not(asked: Footprint, held: list[Footprint], capacity: int) -> None:
    refusal = refuse(asked, held, capacity)
    assert (refusal is None) == (used_bytes([*held, asked]) <= capacity)
    if refusal is not None:
        assert (refusal.asked, refusal.there) == (asked.total, capacity - used_bytes(held))


def test_a_refusal_names_bytes_asked_and_bytes_there_and_what_to_set() -> None:
    held = [Footprint(weights=600 << 20, reserve=0, kv=0)]
    refusal = refuse(Footprint(weights=400 << 20, reserve=64 << 20, kv=128 << 20), held, 1 << 30)
    assert refusal is not None
    assert "needs 592Mi (weights 400Mi, KV 128Mi, runtime reserve 64Mi" in refusal.message
    assert "there are 424Mi of 1Gi" in refusal.message
    assert str(592 << 20) in refusal.message
    assert "memory.kvMin" in refusal.message


@given(st.integers(0, 1 << 34), st.integers(1, 1 << 20), st.integers(1, 64))
def test_a_kv_budget_is_whole_pages_and_never_exceeded(budget: int, per_token: int, page: int) -> None:
    tokens = kv_tokens(budget, per_token, page)
    assert tokens % page == 0
    assert tokens * per_token <= budget < (tokens + page) * per_token


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 40))
def test_memory_is_dearer_the_more_is_used_and_never_infinite(used: int, capacity: int) -> None:
    price = memory_price(2.0, min(used, capacity), capacity)
    assert 0 <= price <= 2.0 / MIN_SLACK_SHARE + 1e-6
    assert memory_price(2.0, 0, capacity) == 0.0
    assert price <= memory_price(2.0, capacity, capacity) + 1e-6
