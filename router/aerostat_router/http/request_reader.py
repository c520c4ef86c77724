"""Bytes of a client become whole requests, or the error that ends the connection. No I/O, no clock: `front` owns the socket and time.

llhttp, in its strict mode, rejects what makes two parsers disagree (both or repeated framing fields, folded lines, bare LF, spaces before
a colon). On top come the limits and the rules that it leaves to us. The parser lives as long as its connection.
"""

import re
from collections import deque
from enum import Enum
from typing import Any, NoReturn

import httptools

from aerostat_core.api_errors import ApiError, body_too_large
from aerostat_router.http import errors
from aerostat_router.http.messages import Request
from aerostat_router.http.settings import FrontSettings

_ORIGIN = re.compile(rb"https?://[^/?]*", re.IGNORECASE)


class Phase(Enum):
    """What the connection waits for."""

    IDLE = "idle"  # the first byte of a request
    HEAD = "head"
    BODY = "body"
    OVER = "over"  # nothing more: the last request said so, or the input is broken


class _RejectedError(Exception):
    """Leaves the parser's callbacks; `RequestReader.error` says why."""


class RequestReader:
    """`ready` holds whole requests in order; `error`, when set, comes after them. Once OVER, all input is ignored."""

    def __init__(self, settings: FrontSettings) -> None:
        self.ready: deque[Request] = deque()
        self.error: ApiError | None = None
        self.phase = Phase.IDLE
        self.wants_continue = False  # the client waits for "100 Continue" before it sends the body; the front clears it
        self._max_head_bytes = settings.max_head_bytes
        self._max_headers = settings.max_headers
        self._max_body_bytes = settings.max_body_bytes
        self._max_pipelined = settings.max_pipelined
        self._parser: Any = httptools.HttpRequestParser(self)
        self._n_unfinished = 0  # bytes of a head that began in an earlier feed
        self._begin()

    def feed(self, data: bytes) -> None:
        """Takes whatever arrived. Never raises for bad input: see `error`."""
        if self._is_over():
            return
        began_before = self.phase is Phase.HEAD
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as broken:
            if not self._is_over():
                self._fail(errors.malformed(str(broken)))
        if self.phase is Phase.HEAD and began_before:
            self._n_unfinished += len(data)
            if self._n_unfinished > self._max_head_bytes:
                self._fail(errors.head_too_large("bytes", self._max_head_bytes))

    def _is_over(self) -> bool:
        return self.phase is Phase.OVER

    def _begin(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._url = b""
        self._body: list[bytes] = []
        self._n_head = self._n_headers = self._n_body = self._n_unfinished = 0
        self._is_http_10 = False

    def _fail(self, error: ApiError) -> None:
        self.error = error
        self.phase = Phase.OVER
        self.wants_continue = False

    def _reject(self, error: ApiError) -> NoReturn:
        self._fail(error)
        raise _RejectedError

    # Callbacks of the parser; what they raise comes out of feed_data as an HttpParserError.

    def on_message_begin(self) -> None:
        if self.phase is Phase.OVER:
            raise _RejectedError
        self._begin()
        self.phase = Phase.HEAD

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._n_head += len(url)
        if self._n_head > self._max_head_bytes:
            self._reject_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._n_headers += 1
        self._n_head += len(name) + len(value) + 4
        if self._n_headers > self._max_headers or self._n_head > self._max_head_bytes:
            self._reject_head()
        if self.phase is Phase.BODY:
            return  # a trailer: allowed, and nobody here reads one
        key = name.lower()
        before = self._headers.get(key)
        if before is None:
            self._headers[key] = value
        elif key == b"host":
            self._reject(errors.malformed("more than one Host"))
        else:
            self._headers[key] = before + (b"; " if key == b"cookie" else b", ") + value

    def _reject_head(self) -> None:
        if self._n_headers > self._max_headers:
            self._reject(errors.head_too_large("fields", self._max_headers))
        self._reject(errors.head_too_large("bytes", self._max_head_bytes))

    def on_headers_complete(self) -> None:
        self.phase = Phase.BODY
        headers = self._headers
        version = self._parser.get_http_version()
        if version == "1.0":
            self._is_http_10 = True
        elif version != "1.1":
            self._reject(errors.unsupported_version(version))
        elif b"host" not in headers:
            self._reject(errors.malformed("no Host"))
        if self._parser.get_method() == b"CONNECT":
            self._reject(errors.malformed("CONNECT is for forward proxies"))
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            self._check_coding(coding)
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._max_body_bytes:
            self._reject(body_too_large(self._max_body_bytes))
        expected = headers.get(b"expect")
        if expected is not None and not self._is_http_10:
            self._check_expectation(expected, has_body=coding is not None or length not in (None, b"0"))

    def _check_coding(self, coding: bytes) -> None:
        if self._is_http_10:
            self._reject(errors.malformed("Transfer-Encoding in HTTP/1.0"))
        if coding.lower() != b"chunked":
            self._reject(errors.unsupported_coding(coding.decode("latin-1")))

    def _check_expectation(self, expected: bytes, *, has_body: bool) -> None:
        if expected.lower() != b"100-continue":
            self._reject(errors.unsupported_expectation(expected.decode("latin-1")))
        self.wants_continue = has_body

    def on_body(self, data: bytes) -> None:
        self._n_body += len(data)
        if self._n_body > self._max_body_bytes:
            self._reject(body_too_large(self._max_body_bytes))
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # comes again, without the wish
        self.wants_continue = False
        path, query = self._split_url()
        keep_alive = self._parser.should_keep_alive()  # known only inside this callback
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self.ready.append(Request(self._parser.get_method(), path, query, self._headers, body, keep_alive, self._is_http_10))
        self._body = []
        # Past the limit the rest of the input is dropped; the client sees the close and sends those requests again.
        if keep_alive and len(self.ready) < self._max_pipelined:
            self.phase = Phase.IDLE
        else:
            self.phase = Phase.OVER

    def _split_url(self) -> tuple[bytes, bytes]:
        url = self._url.partition(b"#")[0]
        if not url.startswith(b"/") and url != b"*":
            origin = _ORIGIN.match(url)
            if origin is None:
                self._reject(errors.malformed("the target is neither a path nor a URL"))
            url = url[origin.end() :]
            if not url.startswith(b"/"):
                url = b"/" + url
        path, _, query = url.partition(b"?")
        return path, query

    def _ignore_upgrade(self, rest: bytes) -> None:
        """RFC 9110 §7.8 lets a server answer in HTTP/1.1 as if `Upgrade` were not there (curl and Java ask for h2c by default).

        llhttp ends the message at its head then; so a new parser gets the same head without the wish, and what followed it.
        """
        method = self._parser.get_method()
        kept = [field for field in self._headers.items() if field[0] not in (b"upgrade", b"connection", b"http2-settings")]
        if not self._parser.should_keep_alive():
            kept.append((b"connection", b"close"))
        version = b"HTTP/1.0" if self._is_http_10 else b"HTTP/1.1"
        head = b"%b %b %b\r\n%b\r\n" % (method, self._url, version, b"".join([b"%b: %b\r\n" % field for field in kept]))
        self.phase = Phase.IDLE
        self.wants_continue = False
        self._parser = httptools.HttpRequestParser(self)
        self.feed(head + rest)
