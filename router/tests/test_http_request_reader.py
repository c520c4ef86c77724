"""Requests come out the same however the bytes are cut, and what two parsers could read in two ways does not come out at all."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_router.http.messages import Request
from aerostat_router.http.request_reader import Phase, RequestReader
from aerostat_router.http.settings import FrontSettings

pytestmark = pytest.mark.cpu

SMALL = FrontSettings(max_head_bytes=400, max_headers=8, max_body_bytes=100, max_pipelined=4)

PLAIN = b"POST /v1/x?a=b HTTP/1.1\r\nHost: h\r\nX-Empty:\r\nX-Two: 1\r\nX-Two: 2\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /y HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3;ext=1\r\nabc\r\n2\r\nde\r\n"
    b"0;last\r\nTrailer-A: 1\r\nX-Two: evil\r\n\r\n"
)
GET = b"GET http://h:80/z?q HTTP/1.1\r\nHost: h\r\n\r\n"
UPGRADE = b"POST /u HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc"


def read(*pieces: bytes, settings: FrontSettings | None = None) -> RequestReader:
    reader = RequestReader(settings or FrontSettings())
    for piece in pieces:
        reader.feed(piece)
    return reader


def outcome(*pieces: bytes) -> tuple[list[Request], int | None, Phase]:
    reader = read(*pieces)
    return list(reader.ready), reader.error.status if reader.error else None, reader.phase


@pytest.mark.parametrize("request_bytes", [PLAIN, CHUNKED, GET, UPGRADE, PLAIN + CHUNKED + GET, UPGRADE + PLAIN])
def test_a_cut_at_any_byte_changes_nothing(request_bytes: bytes) -> None:
    whole = outcome(request_bytes)
    assert whole[0]
    assert whole[1] is None
    for i in range(len(request_bytes)):
        assert outcome(request_bytes[:i], request_bytes[i:]) == whole
    assert outcome(*[bytes([byte]) for byte in request_bytes]) == whole


def test_repeated_fields_are_joined_and_trailers_do_not_become_headers() -> None:
    plain, chunked = read(PLAIN + CHUNKED).ready
    assert plain.headers[b"x-two"] == b"1, 2"
    assert plain.headers[b"x-empty"] == b""
    assert (plain.path, plain.query, plain.body) == (b"/v1/x", b"a=b", b"hello")
    assert chunked.body == b"abcde"
    assert b"x-two" not in chunked.headers
    assert b"trailer-a" not in chunked.headers


token = st.from_regex(rb"[a-z][a-z0-9-]{0,8}", fullmatch=True).map(lambda name: b"x-" + name)
value = st.from_regex(rb"[!-~]([ -~]{0,20}[!-~])?", fullmatch=True)
body = st.binary(max_size=200)


@st.composite
def encoded(draw: st.DrawFn) -> tuple[bytes, bytes, dict[bytes, bytes], bytes]:
    path = b"/" + draw(st.from_regex(rb"[a-z0-9/._-]{0,20}", fullmatch=True))
    headers = draw(st.dictionaries(token, value, max_size=6))
    content = draw(body)
    head = b"POST %b HTTP/1.1\r\nHost: h\r\n%b" % (path, b"".join(b"%b: %b\r\n" % item for item in headers.items()))
    if draw(st.booleans()):
        return head + b"Content-Length: %d\r\n\r\n%b" % (len(content), content), path, headers, content
    size = draw(st.integers(1, 64))
    chunks = [content[i : i + size] for i in range(0, len(content), size)]
    framed = b"".join(b"%x;e=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\nX-T: 1\r\n\r\n", path, headers, content


@given(st.lists(encoded(), min_size=1, max_size=5), st.lists(st.integers(0, 2000), max_size=12))
def test_any_requests_survive_any_cuts(requests: list[tuple[bytes, bytes, dict[bytes, bytes], bytes]], cuts: list[int]) -> None:
    stream = b"".join(request[0] for request in requests)
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    reader = read(*[stream[a:b] for a, b in itertools.pairwise(edges)])
    assert reader.error is None
    assert [(r.path, r.body) for r in reader.ready] == [(path, content) for _, path, _, content in requests]
    for got, (_, _, headers, _) in zip(reader.ready, requests, strict=True):
        assert {name: text for name, text in got.headers.items() if name.startswith(b"x-")} == headers


@given(st.lists(st.one_of(st.binary(max_size=80), st.sampled_from([PLAIN[:40], CHUNKED[:70], b"\r\n", b"0\r\n\r\n", GET])), max_size=6))
def test_no_input_makes_the_reader_fail(pieces: list[bytes]) -> None:
    reader = read(*pieces)
    assert (reader.error is None) or reader.phase is Phase.OVER
    assert all(request.path.startswith(b"/") or request.path == b"*" for request in reader.ready)


HOST = b"POST / HTTP/1.1\r\nHost: h\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, id="length and chunks"),
        pytest.param(HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400, id="chunks and length"),
        pytest.param(HOST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400, id="two equal lengths"),
        pytest.param(HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400, id="two different lengths"),
        pytest.param(HOST + b"Content-Length: 3, 3\r\n\r\nabc", 400, id="a list of lengths"),
        pytest.param(HOST + b"Content-Length: -3\r\n\r\n", 400, id="negative length"),
        pytest.param(HOST + b"Content-Length: +3\r\n\r\nabc", 400, id="signed length"),
        pytest.param(HOST + b"Content-Length: 0x3\r\n\r\nabc", 400, id="hexadecimal length"),
        pytest.param(HOST + b"Content-Length: 99999999999999999999999\r\n\r\n", 400, id="length that overflows"),
        pytest.param(HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501, id="a coding like chunked"),
        pytest.param(HOST + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n", 501, id="a coding without chunks"),
        pytest.param(HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, id="a coding that is not undone"),
        pytest.param(HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, id="chunked twice"),
        pytest.param(HOST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400, id="space before the colon"),
        pytest.param(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, id="chunks in HTTP/1.0"),
        pytest.param(HOST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400, id="negative chunk"),
        pytest.param(HOST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400, id="chunk that overflows"),
        pytest.param(HOST + b"Transfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n", 400, id="bare LF after a chunk size"),
        pytest.param(HOST + b"X-A: b\r\n folded\r\n\r\n", 400, id="folded line"),
        pytest.param(b"GET / HTTP/1.1\r\n Host: h\r\n\r\n", 400, id="folded first line"),
        pytest.param(b"GET / HTTP/1.1\nHost: h\n\n", 400, id="bare LF"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: h\rX: y\r\n\r\n", 400, id="bare CR"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n", 400, id="NUL in a value"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, id="two hosts"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET /\x01 HTTP/1.1\r\nHost: h\r\n\r\n", 400, id="control character in the path"),
        pytest.param(b"GET ftp://h/ HTTP/1.1\r\nHost: h\r\n\r\n", 400, id="foreign scheme"),
        pytest.param(b"get / HTTP/1.1\r\nHost: h\r\n\r\n", 400, id="method in lower case"),
        pytest.param(b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 400, id="tunnel"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="HTTP/2 preface"),
        pytest.param(b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505, id="HTTP/2.0 in the line"),
        pytest.param(b"GET /\r\n\r\n", 505, id="HTTP/0.9"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01", 400, id="TLS"),
        pytest.param(HOST + b"Expect: magic\r\nContent-Length: 1\r\n\r\na", 417, id="unknown expectation"),
    ],
)
def test_ambiguous_or_foreign_input_is_refused_wherever_it_is_cut(request_bytes: bytes, status: int) -> None:
    for i in range(len(request_bytes)):
        reader = read(request_bytes[:i], request_bytes[i:])
        assert reader.error is not None
        assert reader.error.status == status
        assert not reader.ready
        assert reader.phase is Phase.OVER


def test_what_follows_a_refused_request_is_not_read() -> None:
    smuggled = HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET
    assert not read(smuggled, GET).ready


def test_requests_before_a_broken_one_still_count() -> None:
    reader = read(GET + PLAIN + b"BROKEN")
    assert len(reader.ready) == 2
    assert reader.error is not None


@pytest.mark.parametrize(
    ("pieces", "status", "limit"),
    [
        pytest.param([b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 400 + b"\r\n\r\n"], 431, "400 bytes", id="one long value"),
        pytest.param([b"GET /" + b"a" * 400], 431, "400 bytes", id="a long target"),
        pytest.param([b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X: 1\r\n" * 8 + b"\r\n"], 431, "8 fields", id="too many fields"),
        pytest.param([b"GET / HTTP/1.1\r\nHost: h\r\nX: ", *[b"a" * 50] * 9], 431, "400 bytes", id="a value that never ends"),
        pytest.param([HOST + b"Content-Length: 101\r\n\r\n"], 413, "100 bytes", id="a length over the limit, before the body"),
        pytest.param(
            [HOST + b"Transfer-Encoding: chunked\r\n\r\n", *[b"32\r\n" + b"a" * 50 + b"\r\n"] * 3], 413, "100 bytes", id="chunks over it"
        ),
        pytest.param(
            [HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"T: 1\r\n" * 9 + b"\r\n"], 431, "8 fields", id="too many trailers"
        ),
    ],
)
def test_limits_hold_and_are_named(pieces: list[bytes], status: int, limit: str) -> None:
    reader = read(*pieces, settings=SMALL)
    assert reader.error is not None
    assert reader.error.status == status
    assert limit in reader.error.message


def test_a_body_of_exactly_the_limit_passes() -> None:
    assert read(HOST + b"Content-Length: 100\r\n\r\n" + b"a" * 100, settings=SMALL).ready[0].body == b"a" * 100


def test_requests_past_the_pipelining_limit_are_dropped_for_the_client_to_send_again() -> None:
    reader = read(GET * 10, settings=SMALL)
    assert len(reader.ready) == 4
    assert reader.error is None
    assert reader.phase is Phase.OVER


def test_only_a_body_that_is_to_come_is_worth_a_100_continue() -> None:
    expecting = b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-Continue\r\n"
    assert read(expecting + b"Content-Length: 3\r\n\r\n").wants_continue
    assert read(expecting + b"Transfer-Encoding: chunked\r\n\r\n").wants_continue
    assert not read(expecting + b"Content-Length: 0\r\n\r\n").wants_continue
    assert not read(expecting + b"Content-Length: 3\r\n\r\nabc").wants_continue
    assert not read(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n").wants_continue


@pytest.mark.parametrize(
    ("request_bytes", "keep_alive"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_persistence_is_read_from_the_request(request_bytes: bytes, keep_alive: bool) -> None:
    reader = read(request_bytes, GET)
    assert reader.ready[0].keep_alive is keep_alive
    assert len(reader.ready) == (2 if keep_alive else 1)


def test_a_wish_to_upgrade_is_ignored_and_the_body_is_kept() -> None:
    request, after = read(UPGRADE + PLAIN).ready
    assert request.body == b"abc"
    assert b"upgrade" not in request.headers
    assert after.path == b"/v1/x"


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"http://h", b"/", b""),
        (b"HTTPS://h:1/a/b?c=/d", b"/a/b", b"c=/d"),
        (b"http://h?q=/x", b"/", b"q=/x"),
        (b"/a#f", b"/a", b""),
        (b"*", b"*", b""),
    ],
)
def test_absolute_targets_become_paths(target: bytes, path: bytes, query: bytes) -> None:
    request = read(b"OPTIONS %b HTTP/1.1\r\nHost: h\r\n\r\n" % target).ready[0]
    assert (request.path, request.query) == (path, query)
