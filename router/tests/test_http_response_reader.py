"""Responses come out the same however the bytes are cut, end where their framing says, and never lend their connection by mistake."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_router.http.messages import ResponseHead
from aerostat_router.http.response_reader import MalformedResponseError, ResponseReader

pytestmark = pytest.mark.cpu

SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 201 Fine\r\nTransfer-Encoding: chunked\r\n\r\n3;e=1\r\nabc\r\n2\r\nde\r\n0\r\nT: 1\r\nServer: evil\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + SIZED
EMPTY = b"HTTP/1.1 204 None\r\nX: y\r\n\r\n"
UNCHANGED = b"HTTP/1.1 304 Same\r\nContent-Length: 77\r\n\r\n"
NO_REASON = b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n"

Result = tuple[ResponseHead | None, bytes, bool, bool]


def read(*pieces: bytes, is_head_request: bool = False) -> Result:
    reader = ResponseReader(max_head_bytes=1000)
    reader.expect(is_head_request=is_head_request)
    body = b"".join([reader.feed(piece) for piece in pieces])
    return reader.head, body, reader.is_done, reader.can_reuse


@pytest.mark.parametrize("response", [SIZED, CHUNKED, INTERIM, EMPTY, UNCHANGED, NO_REASON])
def test_a_cut_at_any_byte_changes_nothing(response: bytes) -> None:
    whole = read(response)
    assert whole[2:] == (True, True)
    for i in range(len(response)):
        assert read(response[:i], response[i:]) == whole
    assert read(*[bytes([byte]) for byte in response]) == whole


@given(st.binary(max_size=300), st.integers(1, 40), st.lists(st.integers(0, 600), max_size=10))
def test_any_chunked_body_survives_any_cuts(content: bytes, size: int, cuts: list[int]) -> None:
    chunks = [content[i : i + size] for i in range(0, len(content), size)]
    framed = b"".join(b"%X\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    head, body, is_done, can_reuse = read(*[stream[a:b] for a, b in itertools.pairwise(edges)])
    assert (head is not None, body, is_done, can_reuse) == (True, content, True, True)


def test_one_connection_gives_one_response_after_the_other() -> None:
    reader = ResponseReader(max_head_bytes=1000)
    for response, body in ((SIZED, b"hello"), (CHUNKED, b"abcde"), (EMPTY, b""), (SIZED, b"hello")):
        reader.expect(is_head_request=False)
        assert not reader.is_done
        assert reader.feed(response) == body
        assert reader.can_reuse


def test_trailers_do_not_become_headers() -> None:
    head, *_ = read(CHUNKED)
    assert head is not None
    assert head.headers == [(b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize("surplus", [b"X", SIZED, b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"\0"])
@pytest.mark.parametrize("response", [SIZED, CHUNKED, EMPTY])
def test_bytes_after_the_end_are_neither_passed_on_nor_forgiven(response: bytes, surplus: bytes) -> None:
    head, body, is_done, can_reuse = read(response + surplus)
    assert (head, body, is_done) == read(response)[:3]
    assert not can_reuse


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\na",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na",
    ],
)
def test_an_upstream_that_wants_to_close_is_not_kept(response: bytes) -> None:
    assert read(response)[1:] == (b"a", True, False)


def test_a_body_without_length_ends_with_the_connection() -> None:
    reader = ResponseReader(max_head_bytes=1000)
    reader.expect(is_head_request=False)
    assert reader.feed(b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nabc") == b"abc"
    assert reader.ends_with_connection
    assert not reader.is_done
    reader.expect(is_head_request=False)


@pytest.mark.parametrize("response", [SIZED[:-1], CHUNKED[:-2], b"HTTP/1.1 200 OK\r\n"])
def test_a_response_that_states_its_end_does_not_end_with_the_connection(response: bytes) -> None:
    reader = ResponseReader(max_head_bytes=1000)
    reader.expect(is_head_request=False)
    reader.feed(response)
    assert not reader.ends_with_connection


def test_the_answer_to_head_ends_with_its_head_and_its_connection_serves_once() -> None:
    head, body, is_done, can_reuse = read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", is_head_request=True)
    assert head is not None
    assert (body, is_done, can_reuse) == (b"", True, False)


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="length and chunks"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nab", id="two lengths"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nab", id="a coding that is not undone"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", id="two codings"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n", id="folded line"),
        pytest.param(b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", id="bare LF"),
        pytest.param(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nzz", id="an upgrade nobody asked for"),
        pytest.param(b"SSH-2.0-x\r\n", id="another protocol"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 1000, id="a head that never ends"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" * 50, id="interim answers that never end"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", id="broken chunk"),
    ],
)
def test_what_is_no_response_is_refused_wherever_it_is_cut(response: bytes) -> None:
    for i in range(len(response)):
        with pytest.raises(MalformedResponseError):
            read(response[:i], response[i:])
