"""The tail is the end of the body, bounded, and gives the usage that the engine wrote, not one that a model wrote about."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_router.http.tail import Tail

pytestmark = pytest.mark.cpu


def tail_of(*pieces: bytes, max_bytes: int = 16 << 10) -> Tail:
    tail = Tail(max_bytes)
    for piece in pieces:
        tail.add(piece)
    return tail


@given(st.lists(st.binary(max_size=30), max_size=30), st.integers(1, 40))
def test_the_tail_is_the_end_of_all_that_was_added(pieces: list[bytes], max_bytes: int) -> None:
    tail = Tail(max_bytes)
    for piece in pieces:
        tail.add(piece)
        assert sum(map(len, tail._parts)) <= 3 * max_bytes
    whole = b"".join(pieces)
    assert tail.value() == whole[-max_bytes:]
    assert tail.n_bytes == len(whole)


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def test_usage_is_read_from_the_last_event_that_has_one() -> None:
    events = [{"usage": None}, {"usage": {"prompt_tokens": 1}}, {"choices": [], "usage": USAGE}, {"usage": None}]
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    assert tail_of(stream).usage() == USAGE


@given(st.text(max_size=50), st.booleans())
def test_usage_is_read_from_a_json_body_whatever_the_model_said(text: str, is_compact: bool) -> None:
    content = f'{text} "usage": {{"prompt_tokens": 99}}'
    body = {"choices": [{"message": {"content": content}}], "usage": USAGE, "metadata": {"content": content}}
    assert tail_of(json.dumps(body, separators=(",", ":") if is_compact else None).encode()).usage() == USAGE


def test_there_is_no_usage_where_none_is_whole() -> None:
    assert tail_of(b"").usage() is None
    assert tail_of(b'data: {"usage": null}\n\n').usage() is None
    assert tail_of(b'{"usage": {"prompt_tokens": 1').usage() is None
    assert tail_of(b'{"usage": {"prompt_tokens": 1}}', max_bytes=12).usage() is None
