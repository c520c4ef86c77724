"""Errors have the shape that the caller's client library parses."""

import json

import pytest

from aerostat_core.api_errors import saturated, upstream_disconnected
from aerostat_router.http.errors import ANTHROPIC, OPENAI, error_headers

pytestmark = pytest.mark.cpu


def test_openai_errors_have_all_four_members() -> None:
    body = json.loads(OPENAI.body(upstream_disconnected("m")))
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == "upstream_disconnected"
    event = OPENAI.event(upstream_disconnected("m"))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")


def test_anthropic_errors_carry_the_type_of_their_status() -> None:
    body = json.loads(ANTHROPIC.body(saturated("m", retry_after=1)))
    assert body["type"] == "error"
    assert body["error"]["type"] == "rate_limit_error"
    assert ANTHROPIC.event(upstream_disconnected("m")).startswith(b"event: error\ndata: {")


def test_a_dropped_call_says_when_to_come_back_and_why_it_was_dropped() -> None:
    assert error_headers(saturated("m", retry_after=1.2)) == [
        (b"retry-after", b"2"),
        (b"x-aerostat-dropped-reason", b"rejected-saturated"),
        (b"x-llm-d-request-dropped-reason", b"rejected-saturated"),
    ]
    assert error_headers(upstream_disconnected("m")) == []
