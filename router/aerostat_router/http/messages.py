"""What crosses the data path: requests, response heads, and the one place where heads become bytes.

Header names are lower-case bytes everywhere. The values on the hot path are named tuples: immutable, and three times cheaper to make
than a frozen dataclass.
"""

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import NamedTuple

Header = tuple[bytes, bytes]

# RFC 9110 §7.6.1, plus the framing fields, which each connection states for itself.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}

CHUNKED = b"transfer-encoding: chunked\r\n"
CLOSE = b"connection: close\r\n"
KEEP_ALIVE = b"connection: keep-alive\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class Request(NamedTuple):
    """A whole request. `headers` joins repeated fields with a comma; `keep_alive` and `is_http_10` are the client's wishes."""

    method: bytes
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool
    is_http_10: bool

    def header(self, name: bytes) -> str | None:
        """The field as text (latin-1, so that any bytes survive), or None. `name` is lower case."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


class ResponseHead(NamedTuple):
    """An upstream's answer before its body. `content_length` is None where the body ends otherwise (last chunk, end of stream)."""

    status: int
    headers: Sequence[Header]
    content_length: int | None

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


def has_no_body(status: int, method: bytes) -> bool:
    """RFC 9112 §6.3, rule 1: these answers end with their head, whatever their fields say."""
    return method == b"HEAD" or status in (204, 304) or status < 200


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def encode_fields(headers: Iterable[Header]) -> bytes:
    """Header lines, each with its line end.

    Raises ValueError when a name or value holds CR, LF or NUL: whoever could place one there could write a head of its own.
    """
    parts: list[bytes] = []
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    block = b"".join(parts)
    n_lines = len(parts) // 4
    if block.count(b"\n") != n_lines or block.count(b"\r") != n_lines or b"\0" in block:
        raise ValueError("a header holds CR, LF or NUL: check the value before it becomes a header")
    return block


def end_to_end(head: ResponseHead, replaced: Iterable[bytes]) -> list[Header]:
    """The fields that go on to the client: neither hop-by-hop, nor named in `Connection`, nor replaced by one of ours."""
    dropped = HOP_BY_HOP.union(replaced)
    connection = head.header(b"connection")
    if connection is not None:
        dropped = dropped.union(token.strip().lower() for token in connection.split(b","))
    return [field for field in head.headers if field[0] not in dropped]
