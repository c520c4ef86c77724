"""One request and its answer: what a handler holds. It answers at once, forwards to an engine, or keeps the exchange for later.

An exchange is also the sink of its own upstream call, so that a chunk goes from one socket to the other through two calls. Body bytes pass
through as they are, in our own chunks: so an upstream's framing, extensions and trailers end here, and an error event can follow any byte.

The answer's head waits for the first byte of the body. Until then nothing has reached the client, and the handler may try elsewhere.
"""

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from aerostat_core.api_errors import ApiError
from aerostat_core.ids import Seconds
from aerostat_router.http.errors import OPENAI, ErrorShape, error_headers, internal_error
from aerostat_router.http.messages import (
    CHUNKED,
    CLOSE,
    KEEP_ALIVE,
    LAST_CHUNK,
    Header,
    Request,
    ResponseHead,
    encode_fields,
    end_to_end,
    has_no_body,
    status_line,
)
from aerostat_router.http.stream_call import Call, CallRequest, Endpoint, Failure, StreamCaller
from aerostat_router.http.tail import Tail

logger = logging.getLogger(__name__)

MAX_REFUSAL_BYTES = 64 << 10
_JSON: tuple[Header, ...] = ((b"content-type", b"application/json"),)


class Outcome(Enum):
    """How a forward ended. After REFUSED and UNREACHED nothing has reached the client: the handler still owes an answer."""

    DONE = "done"
    REFUSED = "refused"  # the upstream answered with an error status; its body is in `Forwarded.refusal`
    UNREACHED = "unreached"  # it failed before a byte of the body
    BROKEN = "broken"  # it failed later; the client has been told
    ABANDONED = "abandoned"  # the client left; the upstream call is cancelled


class Forwarded(NamedTuple):
    """`status` is the upstream's, None when it gave none. `tail` is the end of what was passed on."""

    outcome: Outcome
    status: int | None
    tail: Tail
    failure: Failure | None = None
    refusal: bytes = b""


class Watcher(Protocol):
    """Who started a forward, and accounts for it: `on_end` comes exactly once per forward, before anything else happens here."""

    def on_first_byte(self, exchange: "Exchange") -> None:
        """The first byte of the body goes to the client now."""
        ...

    def on_end(self, exchange: "Exchange", forwarded: Forwarded) -> None: ...

    def explain(self, failure: Failure) -> ApiError:
        """What to tell a client whose stream breaks (`upstream_disconnected`, with the model's name)."""
        ...


class Handler(Protocol):
    def handle(self, exchange: "Exchange") -> None:
        """Decides, at once and without waiting: reply, forward, or keep the exchange and have `on_disconnect` set.

        An exception is logged and answered with 500.
        """
        ...


class Client(Protocol):
    """The connection that an exchange answers on; `front.Front` in production."""

    is_write_paused: bool
    peer: str

    def now(self) -> Seconds: ...

    def date(self) -> bytes:
        """A `Date` line."""
        ...

    def is_keeping(self) -> bool:
        """False when the connection closes after this answer whatever the client wishes."""
        ...

    def write(self, data: bytes) -> None: ...

    def end(self, exchange: "Exchange", *, keep: bool) -> None:
        """The answer is written in full, or cut: with `keep` False the connection closes behind it."""
        ...


class Exchange:
    """The handler's verbs are harmless after the client has left: `is_open` tells, `on_disconnect` is called."""

    __slots__ = (
        "_call",
        "_caller",
        "_client",
        "_has_sent_head",
        "_head",
        "_is_chunked",
        "_keep",
        "_refusal",
        "_reply_headers",
        "_tail",
        "_watcher",
        "error_shape",
        "first_byte_at",
        "is_open",
        "on_disconnect",
        "received_at",
        "request",
    )

    def __init__(self, request: Request, client: Client, caller: StreamCaller) -> None:
        self.request = request
        self.received_at = client.now()
        self.first_byte_at: Seconds | None = None
        self.on_disconnect: Callable[[], None] | None = None
        self.error_shape: ErrorShape = OPENAI
        self.is_open = True  # an answer is still owed or under way
        self._client = client
        self._caller = caller
        self._keep = False
        self._call: Call | None = None
        self._watcher: Watcher | None = None

    @property
    def peer(self) -> str:
        """The client's address, empty where there is none."""
        return self._client.peer

    # The handler's verbs.

    def reply(self, status: int, headers: Sequence[Header] = (), body: bytes = b"") -> None:
        """Answers in full. Raises ValueError when a header cannot be written safely, RuntimeError when a forward is under way."""
        if not self.is_open:
            return
        if self._watcher is not None:
            raise RuntimeError("a forward is under way: reply after its on_end")
        length = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(body)
        sent = b"" if has_no_body(status, self.request.method) else body
        ours = encode_fields(headers)
        self._client.write(b"".join((status_line(status), self._client.date(), ours, length, self._connection(), b"\r\n", sent)))
        self.is_open = False
        self._client.end(self, keep=self._keep)

    def reply_error(self, error: ApiError, headers: Sequence[Header] = ()) -> None:
        self.reply(error.status, (*_JSON, *error_headers(error), *headers), self.error_shape.body(error))

    def forward(
        self,
        endpoint: Endpoint,
        call: CallRequest,
        watcher: Watcher,
        *,
        reply_headers: Sequence[Header] = (),
        head_timeout_s: Seconds | None = None,
    ) -> None:
        """Calls `endpoint` and passes its answer on; `reply_headers` are added to it, and replace its own of the same name."""
        self._tail = Tail()
        if not self.is_open:
            watcher.on_end(self, Forwarded(Outcome.ABANDONED, None, self._tail))
            return
        if self._watcher is not None:
            raise RuntimeError("a forward is under way: forward again after its on_end")
        self._head: ResponseHead | None = None
        self._has_sent_head = False
        self._refusal: bytearray | None = None
        self._reply_headers = reply_headers
        self._call = self._caller.stream_call(endpoint, call, self, head_timeout_s=head_timeout_s)
        self._watcher = watcher
        if self._client.is_write_paused:
            self._call.pause()

    # The connection's side.

    def abandon(self) -> None:
        """The client left: cancels what works for it, and tells whoever waits."""
        self.is_open = False
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if self._call is not None:
            self._call.cancel()
            self._settle(Outcome.ABANDONED)
        elif on_disconnect is not None:
            on_disconnect()

    def pause(self) -> None:
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        if self._call is not None:
            self._call.resume()

    # The upstream's side (CallSink).

    def on_head(self, head: ResponseHead) -> None:
        self._head = head
        if head.status >= 400:
            self._refusal = bytearray()

    def on_data(self, data: bytes) -> None:
        if self._refusal is not None:
            if len(self._refusal) < MAX_REFUSAL_BYTES:
                self._refusal += data
            return
        self._tail.add(data)
        if not self._has_sent_head:
            self._send_first(data)
        elif self._is_chunked:
            self._client.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._client.write(data)

    def on_done(self) -> None:
        if self._refusal is not None:
            self._settle(Outcome.REFUSED)
            return
        if not self._has_sent_head:
            self._client.write(self._encode_head() + (LAST_CHUNK if self._is_chunked else b""))
        elif self._is_chunked:
            self._client.write(LAST_CHUNK)
        self._settle_and_end(Outcome.DONE, keep=self._keep)

    def on_failure(self, failure: Failure) -> None:
        if not self._has_sent_head:
            self._settle(Outcome.UNREACHED, failure)
            return
        self._write_broken(failure)
        self._settle_and_end(Outcome.BROKEN, failure, keep=False)

    # Inside.

    def _send_first(self, data: bytes) -> None:
        head = self._encode_head()
        self.first_byte_at = self._client.now()
        if self._is_chunked:
            self._client.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        else:
            self._client.write(head + data)
        if self._watcher is not None:
            self._watcher.on_first_byte(self)

    def _encode_head(self) -> bytes:
        head = self._head
        assert head is not None  # the sink's order: a head comes first
        ours = encode_fields(self._reply_headers)
        theirs = encode_fields(end_to_end(head, [name for name, _ in self._reply_headers]))
        framing = b""
        self._is_chunked = False
        if head.content_length is not None:
            framing = b"content-length: %d\r\n" % head.content_length if head.status != 204 else b""
        elif not has_no_body(head.status, self.request.method):
            if self.request.is_http_10:
                self.request = self.request._replace(keep_alive=False)  # only the end of the stream can end this body
            else:
                self._is_chunked = True
                framing = CHUNKED
        self._has_sent_head = True
        return b"".join((status_line(head.status), theirs, ours, framing, self._connection(), b"\r\n"))

    def _connection(self) -> bytes:
        """Decides, when the head is written, whether the connection lives on."""
        self._keep = self.request.keep_alive and self._client.is_keeping()
        if not self._keep:
            return CLOSE
        return KEEP_ALIVE if self.request.is_http_10 else b""

    def _write_broken(self, failure: Failure) -> None:
        """A stream of events ends with one that says why; any other body is cut, which its framing shows."""
        head, watcher = self._head, self._watcher
        if head is None or watcher is None or head.content_length is not None:
            return
        kind = head.header(b"content-type") or b""
        if not kind.lower().startswith(b"text/event-stream"):
            return
        event = self.error_shape.event(watcher.explain(failure))
        if not self._tail.value().endswith((b"\n\n", b"\r\n\r\n")):
            event = b"\n\n" + event  # the upstream broke off inside an event
        if self._is_chunked:
            self._client.write(b"%x\r\n%b\r\n%b" % (len(event), event, LAST_CHUNK))
        else:
            self._client.write(event)

    def _settle(self, outcome: Outcome, failure: Failure | None = None) -> None:
        """The one place where a forward ends."""
        watcher, self._watcher, self._call = self._watcher, None, None
        if watcher is None:
            return
        status = self._head.status if self._head is not None else None
        try:
            watcher.on_end(self, Forwarded(outcome, status, self._tail, failure, bytes(self._refusal or b"")))
        except Exception:
            logger.exception("the watcher of a forward failed on its end (%s)", outcome.value)
            self.give_up()

    def _settle_and_end(self, outcome: Outcome, failure: Failure | None = None, *, keep: bool) -> None:
        self.is_open = False
        self._settle(outcome, failure)
        self._client.end(self, keep=keep)

    def give_up(self) -> None:
        """The handler failed: 500 where no forward is under way, else that ends and the connection is cut."""
        if self._watcher is None:
            self.reply_error(internal_error())
        else:
            self.abandon()
            self._client.end(self, keep=False)
