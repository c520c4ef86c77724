"""Heads are written in one place, where nothing can be smuggled into them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_router.http.messages import ResponseHead, encode_fields, end_to_end, has_no_body, status_line
from aerostat_router.http.settings import FrontSettings, ListenSettings, UpstreamSettings

pytestmark = pytest.mark.cpu


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=8), st.binary(max_size=12)), max_size=5))
def test_no_value_can_begin_a_line_of_its_own(fields: list[tuple[bytes, bytes]]) -> None:
    has_forbidden = any(byte in name + value for name, value in fields for byte in b"\r\n\0")
    if has_forbidden:
        with pytest.raises(ValueError, match="CR, LF or NUL"):
            encode_fields(fields)
    else:
        assert encode_fields(fields).split(b"\r\n") == [*[b"%b: %b" % field for field in fields], b""]


def test_an_injected_pair_cannot_hide_in_the_count() -> None:
    with pytest.raises(ValueError, match="CR, LF or NUL"):
        encode_fields([(b"a", b"x\r"), (b"\nb", b"y")])


def test_hop_by_hop_named_and_replaced_fields_stay_here() -> None:
    names = [b"connection", b"keep-alive", b"x-private", b"content-type", b"x-request-id", b"te", b"upgrade", b"content-length"]
    values = dict.fromkeys(names, b"v") | {b"connection": b"close, X-Private"}
    head = ResponseHead(200, [(name, values[name]) for name in names], 1)
    assert end_to_end(head, [b"x-request-id"]) == [(b"content-type", b"v")]


def test_answers_without_a_body_are_known() -> None:
    assert has_no_body(200, b"HEAD")
    assert has_no_body(204, b"GET")
    assert has_no_body(304, b"GET")
    assert not has_no_body(200, b"GET")


def test_an_unregistered_status_still_has_a_line() -> None:
    assert status_line(200) == b"HTTP/1.1 200 OK\r\n"
    assert status_line(599) == b"HTTP/1.1 599 \r\n"


def test_a_setting_that_cannot_work_is_named() -> None:
    with pytest.raises(ValueError, match=r"FrontSettings\.idle_timeout_s must be above 0, got 0"):
        FrontSettings(idle_timeout_s=0)
    with pytest.raises(ValueError, match=r"UpstreamSettings\.max_idle_connections"):
        UpstreamSettings(max_idle_connections=-1)
    assert ListenSettings().address.port == 0
