"""Equal prefixes have equal hashes, different ones different hashes, and nothing leaks through a boundary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.prefix_hash import DIGEST_BYTES, inferred_session_key, message_chain, session_key, token_pages, token_prefix

pytestmark = pytest.mark.cpu

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
PAGE = st.integers(1, 9)


@given(TOKENS, TOKENS, PAGE)
def test_pages_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int], page: int) -> None:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    pages_a, pages_b = list(token_pages(a, page)), list(token_pages(b, page))
    assert pages_a[: same // page] == pages_b[: same // page]
    assert not set(pages_a[same // page :]) & set(pages_b[same // page :])


@given(TOKENS, TOKENS, PAGE)
def test_a_longer_prefix_extends_a_shorter_one(tokens: list[int], more: list[int], page: int) -> None:
    short, long = list(token_pages(tokens, page)), list(token_pages(tokens + more, page))
    assert long[: len(short)] == short
    assert len(long) == len(tokens + more) // page


@given(TOKENS, PAGE)
def test_the_prefix_is_the_last_full_page(tokens: list[int], page: int) -> None:
    digest, covered = token_prefix(tokens, page)
    assert covered == len(tokens) // page * page
    assert digest == (list(token_pages(tokens, page)) or [b""])[-1]
    assert token_prefix(tokens[:covered], page) == (digest, covered)


@given(TOKENS.filter(lambda t: len(t) >= 12))
def test_page_sizes_do_not_mix(tokens: list[int]) -> None:
    assert not set(token_pages(tokens, 3)) & set(token_pages(tokens, 4))


def test_a_page_has_at_least_a_token() -> None:
    with pytest.raises(ValueError, match="page_size must be >= 1"):
        list(token_pages([1], 0))


MESSAGES = st.lists(st.binary(max_size=8), max_size=6)


@given(MESSAGES, st.binary(max_size=8))
def test_a_chain_grows_by_one_hash_for_each_message(messages: list[bytes], more: bytes) -> None:
    chain = message_chain(model="m", tenant="t", messages=messages)
    assert len(chain) == len(set(chain)) == len(messages)
    assert message_chain(model="m", tenant="t", messages=[*messages, more])[:-1] == chain


@given(MESSAGES, MESSAGES)
def test_chains_are_equal_only_for_equal_messages(a: list[bytes], b: list[bytes]) -> None:
    """Wherever the borders between messages lie."""
    chains = [message_chain(model="m", tenant="t", messages=messages) for messages in (a, b)]
    assert (chains[0] == chains[1]) == (a == b)


@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_tenants_and_models_never_meet(model: str, tenant: str, other_model: str, other_tenant: str) -> None:
    one = message_chain(model=model, tenant=tenant, messages=[b"hello"])
    other = message_chain(model=other_model, tenant=other_tenant, messages=[b"hello"])
    assert (one == other) == ((model, tenant) == (other_model, other_tenant))
    keys = session_key(tenant=model, session_id=tenant), session_key(tenant=other_model, session_id=other_tenant)
    assert (keys[0] == keys[1]) == ((model, tenant) == (other_model, other_tenant))


def test_a_session_key_tells_neither_tenant_nor_id() -> None:
    key = session_key(tenant="acme", session_id="secret-session")
    assert len(key) == 2 * DIGEST_BYTES
    assert "acme" not in key
    assert "secret" not in key


def test_an_inferred_session_is_never_a_named_one() -> None:
    (chain,) = message_chain(model="m", tenant="t", messages=[b"hello"])
    assert inferred_session_key(chain) != session_key(tenant="t", session_id=chain.hex())


def test_hashes_stay_what_they_were() -> None:
    """Parts of different versions compare them."""
    assert token_prefix([1, 2, 3], 2)[0].hex() == "ed4575d3e3701cb12b80dd68fb0fd46a"
    assert session_key(tenant="t", session_id="s") == "60a8c71c8d863a754d3a93284849abb3"
