"""A client's connection to the router, on a transport without a socket, with handlers that a test plays."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from aerostat_core.api_errors import ApiError, upstream_disconnected
from aerostat_core.ids import Seconds
from aerostat_router.http.exchange import Exchange, Forwarded
from aerostat_router.http.front import Front, Hub
from aerostat_router.http.messages import Header, ResponseHead
from aerostat_router.http.settings import FrontSettings
from aerostat_router.http.stream_call import CallRequest, CallSink, Endpoint, Failure, FailureKind
from aerostat_testing.raw_http import FakeTransport

GET = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
GET_10 = b"GET /a HTTP/1.0\r\n\r\n"
SSE_HEAD = ResponseHead(200, [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")], None)
JSON_HEAD = ResponseHead(200, [(b"content-type", b"application/json"), (b"content-length", b"4")], 4)
LOST = Failure(FailureKind.DISCONNECTED, "lost")
ENDPOINT = Endpoint("engine", 1)


@dataclass
class FakeCall:
    """One started call; the test plays the upstream through `sink`."""

    endpoint: Endpoint
    request: CallRequest
    sink: CallSink
    head_timeout_s: Seconds | None
    is_cancelled: bool = False
    is_paused: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def answer(self, head: ResponseHead, *pieces: bytes) -> None:
        self.sink.on_head(head)
        for piece in pieces:
            self.sink.on_data(piece)
        self.sink.on_done()


@dataclass
class FakeCaller:
    calls: list[FakeCall] = field(default_factory=list)

    def stream_call(self, endpoint: Endpoint, request: CallRequest, sink: CallSink, *, head_timeout_s: Seconds | None = None) -> FakeCall:
        self.calls.append(FakeCall(endpoint, request, sink, head_timeout_s))
        return self.calls[-1]


@dataclass
class Proxy:
    """A handler that forwards everything, and its own watcher. `on_end` may be replaced to retry or to reply."""

    ends: list[Forwarded] = field(default_factory=list)
    n_first_bytes: int = 0
    reply_headers: tuple[Header, ...] = ((b"x-aerostat-instance", b"i"),)
    react: Callable[[Exchange, Forwarded], None] | None = None

    def handle(self, exchange: Exchange) -> None:
        self.start(exchange)

    def start(self, exchange: Exchange) -> None:
        request = exchange.request
        exchange.forward(ENDPOINT, CallRequest(request.method, request.path, (), request.body), self, reply_headers=self.reply_headers)

    def on_first_byte(self, exchange: Exchange) -> None:
        self.n_first_bytes += 1

    def on_end(self, exchange: Exchange, forwarded: Forwarded) -> None:
        self.ends.append(forwarded)
        if self.react is not None:
            self.react(exchange, forwarded)

    def explain(self, failure: Failure) -> ApiError:
        return upstream_disconnected("m")


class Echo:
    def handle(self, exchange: Exchange) -> None:
        request = exchange.request
        exchange.reply(200, [(b"x-method", request.method)], request.path + b" " + request.body)


@dataclass
class Holder:
    """Holds every exchange: a held call."""

    held: list[Exchange] = field(default_factory=list)
    n_gone: int = 0

    def handle(self, exchange: Exchange) -> None:
        exchange.on_disconnect = self.note_gone
        self.held.append(exchange)

    def note_gone(self) -> None:
        self.n_gone += 1


class Rig:
    def __init__(self, handler: "Echo | Proxy | Holder | Broken", settings: FrontSettings | None = None) -> None:
        self.caller = FakeCaller()
        self.hub = Hub(handler, self.caller, settings or FrontSettings(), asyncio.get_running_loop())
        self.transport = self.connect()

    def connect(self) -> FakeTransport:
        return FakeTransport(Front(self.hub))

    @property
    def front(self) -> Front:
        front = self.transport.protocol
        assert isinstance(front, Front)
        return front

    def send(self, *pieces: bytes) -> bytes:
        for piece in pieces:
            self.front.data_received(piece)
        self.hub.check_integrity()
        return self.transport.take()

    async def finish(self) -> None:
        """After every test: the connection ends and nothing is left."""
        self.transport.lose()
        await asyncio.sleep(0)
        self.hub.check_integrity()
        assert self.hub.n_in_flight == 0
        assert len(self.hub.deadlines) == 0
        assert self.hub.emptied.is_set()


class Broken:
    def handle(self, exchange: Exchange) -> None:
        raise KeyError("a bug")


def without_date(response: bytes) -> bytes:
    return b"\r\n".join(line for line in response.split(b"\r\n") if not line.startswith(b"date: "))
