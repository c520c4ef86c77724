"""Bytes of an upstream become one response: its head, pieces of its body without transfer coding, its end. No I/O, no clock.

The parser lives as long as its connection. Pieces are collected while it runs and handed on after it has returned, so that nothing
which a receiver does can happen inside the parser.
"""

from typing import Any

import httptools

from aerostat_router.http.messages import Header, ResponseHead


class MalformedResponseError(Exception):
    """The upstream sent what is not a response, or one that cannot be passed on safely."""


class ResponseReader:
    def __init__(self, max_head_bytes: int) -> None:
        self.head: ResponseHead | None = None
        self.is_done = False
        self.has_surplus = False  # bytes after the end: the response stands, the connection is not to be used again
        self.has_begun = False  # any byte of this response has come
        self._parser: Any = httptools.HttpResponseParser(self)
        self._max_head_bytes = max_head_bytes
        self._is_head_request = False
        self._keep_alive = False
        self._pieces: list[bytes] = []
        self._headers: list[Header] = []
        self._n_head = 0

    def expect(self, *, is_head_request: bool) -> None:
        """A new request has been sent on this connection."""
        self.head = None
        self.is_done = self.has_surplus = self.has_begun = self._keep_alive = False
        self._is_head_request = is_head_request
        self._pieces = []
        self._n_head = 0

    @property
    def can_reuse(self) -> bool:
        """After a HEAD the parser waits for a body that never comes, so such a connection serves once."""
        return self.is_done and self._keep_alive and not self.has_surplus and not self._is_head_request

    @property
    def ends_with_connection(self) -> bool:
        """The body has neither a length nor chunks: its end is the end of the stream."""
        head = self.head
        if head is None or self.is_done or head.content_length is not None:
            return False
        return head.header(b"transfer-encoding") is None

    def feed(self, data: bytes) -> bytes:
        """Returns the body bytes in `data`. Raises MalformedResponseError."""
        self.has_begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as broken:  # nobody asked for an upgrade
            if not self.is_done:
                raise MalformedResponseError(str(broken)) from broken
            self.has_surplus = True
        if self.head is None:
            self._n_head += len(data)
            self._check_head_size()
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces = []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _check_head_size(self) -> None:
        if self._n_head > self._max_head_bytes:
            raise MalformedResponseError(f"head of more than {self._max_head_bytes} bytes")

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self.is_done:
            self.has_surplus = True
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is None:  # else a trailer, or part of the surplus
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.head is not None or status < 200:
            return
        length = coding = None
        for name, value in self._headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                coding = value.lower()
        if coding not in (None, b"chunked"):
            raise MalformedResponseError(f"transfer coding {coding!r}")
        self.head = ResponseHead(status, self._headers, length)
        if self._is_head_request:
            self.is_done = True

    def on_body(self, data: bytes) -> None:
        if not self.is_done:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self.head is not None and not self.is_done:  # else an interim answer (1xx), or the surplus
            self.is_done = True
            self._keep_alive = self._parser.should_keep_alive()  # known only inside this callback
