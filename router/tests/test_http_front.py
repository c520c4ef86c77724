"""A client's connection, on a transport without a socket: order, ends, limits and time-outs, the last under virtual time."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.api_errors import ApiError, model_waking, upstream_disconnected
from aerostat_core.ids import Seconds
from aerostat_router.http.errors import ANTHROPIC
from aerostat_router.http.exchange import Exchange, Forwarded, Outcome
from aerostat_router.http.front import Front, Hub
from aerostat_router.http.messages import Header, ResponseHead
from aerostat_router.http.settings import FrontSettings
from aerostat_router.http.stream_call import CallRequest, CallSink, Endpoint, Failure, FailureKind
from aerostat_testing.loops import run_in_new_loop
from aerostat_testing.raw_http import FakeTransport

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]

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
class Keeper:
    """Keeps every exchange: a held call."""

    held: list[Exchange] = field(default_factory=list)
    n_gone: int = 0

    def handle(self, exchange: Exchange) -> None:
        exchange.on_disconnect = self.note_gone
        self.held.append(exchange)

    def note_gone(self) -> None:
        self.n_gone += 1


class Rig:
    def __init__(self, handler: "Echo | Proxy | Keeper | Broken", settings: FrontSettings | None = None) -> None:
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


# Replies.


async def test_a_reply_is_one_message_with_length_and_date() -> None:
    rig = Rig(Echo())
    reply = rig.send(POST)
    assert b"\r\ndate: " in reply
    assert without_date(reply) == b"HTTP/1.1 200 OK\r\nx-method: POST\r\ncontent-length: 6\r\n\r\n/b abc"
    await rig.finish()


async def test_pipelined_requests_are_answered_in_order_wherever_they_are_cut() -> None:
    stream = GET + POST + GET
    rig = Rig(Echo())
    whole = without_date(rig.send(stream))
    assert whole.count(b"HTTP/1.1 200 OK") == 3
    for i in range(len(stream)):
        assert without_date(rig.send(stream[:i]) + rig.send(stream[i:])) == whole
    await rig.finish()


async def test_a_pipelined_request_waits_for_the_answer_before_it() -> None:
    keeper = Keeper()
    rig = Rig(keeper)
    rig.send(GET + POST, GET)
    assert [exchange.request.path for exchange in keeper.held] == [b"/a"]
    keeper.held[0].reply(200, (), b"1")
    assert [exchange.request.path for exchange in keeper.held] == [b"/a", b"/b"]
    keeper.held[1].reply(200, (), b"2")
    keeper.held[2].reply(204)
    assert rig.transport.take().count(b"HTTP/1.1 20") == 3
    await rig.finish()


async def test_bytes_behind_a_request_under_way_stop_being_read_past_a_bound() -> None:
    keeper = Keeper()
    rig = Rig(keeper, FrontSettings(max_held_bytes=100))
    is_reading = [rig.transport.is_reading_now]
    for pieces in ((GET, GET * 3), (GET,)):
        rig.send(*pieces)
        is_reading.append(rig.transport.is_reading_now)
    for i in range(5):
        keeper.held[i].reply(204)
    is_reading.append(rig.transport.is_reading_now)
    assert is_reading == [True, True, False, True]
    await rig.finish()


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body_have_neither_length_nor_body(status: int) -> None:
    keeper = Keeper()
    rig = Rig(keeper)
    rig.send(GET)
    keeper.held[0].reply(status, (), b"ignored")
    reply = rig.transport.take()
    assert reply.endswith(b"\r\n\r\n")
    assert b"content-length" not in reply
    await rig.finish()


async def test_head_is_answered_with_the_length_alone() -> None:
    rig = Rig(Echo())
    reply = rig.send(GET.replace(b"GET", b"HEAD"))
    assert b"content-length: 3\r\n" in reply
    assert reply.endswith(b"\r\n\r\n")
    await rig.finish()


@pytest.mark.parametrize(
    ("request_bytes", "line", "closes"),
    [
        (GET, b"", False),
        (GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b"connection: close\r\n", True),
        (GET_10, b"connection: close\r\n", True),
        (GET_10.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"), b"connection: keep-alive\r\n", False),
    ],
)
async def test_the_connection_ends_as_the_client_wished(request_bytes: bytes, line: bytes, closes: bool) -> None:
    rig = Rig(Echo())
    reply = rig.send(request_bytes)
    assert line in reply
    assert (b"connection:" in reply) is bool(line)
    assert rig.transport.is_closing() is closes
    await rig.finish()


async def test_a_failing_handler_is_logged_and_answered_with_500(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(Broken())
    with caplog.at_level(logging.ERROR):
        assert rig.send(GET).startswith(b"HTTP/1.1 500 ")
    assert "the handler failed on GET /a" in caplog.text
    assert rig.send(GET).startswith(b"HTTP/1.1 500 ")
    await rig.finish()


async def test_a_header_that_could_split_the_answer_is_never_written(caplog: pytest.LogCaptureFixture) -> None:
    class Careless:
        def handle(self, exchange: Exchange) -> None:
            exchange.reply(200, [(b"x-echo", b"a\r\nset-cookie: evil")], b"")

    rig = Rig(Echo())
    rig.hub.handler = Careless()
    reply = rig.send(GET)
    assert reply.startswith(b"HTTP/1.1 500 ")
    assert b"evil" not in reply
    await rig.finish()


# Bad input.


async def test_a_bad_request_is_answered_and_the_connection_lingers_until_the_client_leaves() -> None:
    rig = Rig(Echo())
    reply = rig.send(GET + b"BROKEN\r\n\r\n")
    assert reply.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 400 " in reply
    assert b'"type":"invalid_request_error"' in reply
    assert rig.transport.has_written_eof
    assert rig.send(GET) == b""
    assert not rig.transport.is_closing()
    await asyncio.sleep(3)
    assert rig.transport.was_aborted
    await rig.finish()


async def test_a_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    rig = Rig(Echo(), FrontSettings(max_body_bytes=2))
    reply = rig.send(POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
    assert reply.startswith(b"HTTP/1.1 413 ")
    await rig.finish()


async def test_a_connection_over_the_limit_is_told_so() -> None:
    rig = Rig(Echo(), FrontSettings(max_connections=1))
    second = rig.connect()
    assert second.take().startswith(b"HTTP/1.1 503 ")
    assert rig.send(GET).startswith(b"HTTP/1.1 200 ")
    second.lose()
    await rig.finish()


async def test_the_body_is_asked_for_when_the_client_waits_to_be_asked() -> None:
    rig = Rig(Echo())
    head, body = POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n").split(b"\r\n\r\n")
    assert rig.send(head + b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert rig.send(body).endswith(b"/b abc")
    await rig.finish()


async def test_the_body_is_not_asked_for_in_the_middle_of_another_answer() -> None:
    keeper = Keeper()
    rig = Rig(keeper)
    head, body = POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n").split(b"\r\n\r\n")
    assert rig.send(GET + head + b"\r\n\r\n") == b""
    keeper.held[0].reply(204)
    assert rig.transport.take().endswith(b"\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
    rig.send(body)
    keeper.held[1].reply(204)
    await rig.finish()


# Time.


async def test_a_silent_connection_is_closed_after_the_idle_time() -> None:
    rig = Rig(Echo(), FrontSettings(idle_timeout_s=75))
    await asyncio.sleep(50)
    rig.send(GET)
    await asyncio.sleep(74)
    assert not rig.transport.is_closing()
    await asyncio.sleep(1.5)
    assert rig.transport.is_closing()
    assert rig.transport.take() == b""
    await rig.finish()


@pytest.mark.parametrize(
    ("start", "word", "limit_s"), [(GET[:20], b"head did not arrive within 10 s", 10), (POST[:-2], b"body did not arrive within 60 s", 60)]
)
async def test_a_request_that_trickles_in_is_refused_after_its_time_however_it_trickles(start: bytes, word: bytes, limit_s: int) -> None:
    rig = Rig(Echo(), FrontSettings(head_timeout_s=10, body_timeout_s=60))
    rig.send(start)
    await asyncio.sleep(limit_s - 0.5)
    assert rig.send(b"b") == b""  # progress inside a phase buys no time
    await asyncio.sleep(0.8)
    reply = rig.transport.take()
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert word in reply
    await rig.finish()


async def test_a_call_that_is_held_has_no_deadline_here() -> None:
    keeper = Keeper()
    rig = Rig(keeper, FrontSettings(head_timeout_s=1, body_timeout_s=1, idle_timeout_s=1, stall_timeout_s=1))
    rig.send(GET)
    await asyncio.sleep(100)
    keeper.held[0].reply_error(model_waking("m", retry_after=2))
    assert b"retry-after: 2\r\n" in rig.transport.take()
    await rig.finish()


async def test_a_client_that_takes_nothing_is_cut_and_its_call_cancelled() -> None:
    proxy = Proxy()
    rig = Rig(proxy, FrontSettings(stall_timeout_s=60))
    rig.send(GET)
    call = rig.caller.calls[0]
    call.sink.on_head(SSE_HEAD)
    call.sink.on_data(b"data: 1\n\n")
    rig.front.pause_writing()
    assert call.is_paused
    await asyncio.sleep(59)
    assert not rig.transport.is_closing()
    await asyncio.sleep(1.5)
    assert rig.transport.was_aborted
    assert call.is_cancelled
    assert [end.outcome for end in proxy.ends] == [Outcome.ABANDONED]
    await rig.finish()


async def test_a_client_that_takes_its_time_gets_everything() -> None:
    rig = Rig(Proxy(), FrontSettings(stall_timeout_s=6))
    rig.send(GET)
    call = rig.caller.calls[0]
    call.sink.on_head(SSE_HEAD)
    for _ in range(5):
        call.sink.on_data(b"data: 1\n\n")
        rig.front.pause_writing()
        await asyncio.sleep(5)
        rig.front.resume_writing()
        assert not call.is_paused
    call.sink.on_done()
    assert rig.transport.take().endswith(b"0\r\n\r\n")
    await rig.finish()


async def test_requests_of_a_client_that_takes_no_answers_are_not_handled() -> None:
    rig = Rig(Echo())
    rig.front.pause_writing()
    assert rig.send(GET, POST) == b""
    rig.front.resume_writing()
    assert rig.transport.take().count(b"HTTP/1.1 200") == 2
    await rig.finish()


# Hang-ups.


async def test_a_hang_up_while_held_is_told_once_and_later_verbs_are_harmless() -> None:
    keeper, proxy = Keeper(), Proxy()
    rig = Rig(keeper)
    rig.send(GET)
    exchange = keeper.held[0]
    rig.transport.lose()
    await asyncio.sleep(0)
    assert keeper.n_gone == 1
    assert not exchange.is_open
    exchange.reply(200, (), b"late")
    exchange.forward(ENDPOINT, CallRequest(b"GET", b"/"), proxy)
    assert [end.outcome for end in proxy.ends] == [Outcome.ABANDONED]
    assert not rig.caller.calls
    assert rig.transport.take() == b""
    await rig.finish()


@pytest.mark.parametrize("n_pieces", [0, 1])
@pytest.mark.parametrize("reset", [None, ConnectionResetError()])
async def test_a_hang_up_cancels_the_upstream_call_at_once(n_pieces: int, reset: Exception | None) -> None:
    proxy = Proxy()
    rig = Rig(proxy)
    rig.send(GET)
    call = rig.caller.calls[0]
    call.sink.on_head(SSE_HEAD)
    for _ in range(n_pieces):
        call.sink.on_data(b"data: 1\n\n")
    rig.transport.lose(reset)
    await asyncio.sleep(0)
    assert call.is_cancelled
    assert [(end.outcome, end.tail.n_bytes) for end in proxy.ends] == [(Outcome.ABANDONED, 9 * n_pieces)]
    await rig.finish()


async def test_a_hang_up_inside_a_request_leaves_nothing() -> None:
    rig = Rig(Echo())
    rig.send(POST[:-1])
    await rig.finish()
    assert rig.transport.take() == b""


# Forwards.


async def test_a_sized_answer_passes_with_its_length_and_our_headers() -> None:
    proxy = Proxy()
    rig = Rig(proxy)
    rig.send(POST)
    call = rig.caller.calls[0]
    assert call.request == CallRequest(b"POST", b"/b", (), b"abc")
    call.answer(JSON_HEAD, b"{", b"1 }")
    assert rig.transport.take() == (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-aerostat-instance: i\r\ncontent-length: 4\r\n\r\n{1 }"
    )
    assert proxy.n_first_bytes == 1
    assert [(end.outcome, end.status, end.tail.value()) for end in proxy.ends] == [(Outcome.DONE, 200, b"{1 }")]
    rig.send(GET)
    assert len(rig.caller.calls) == 2
    await rig.finish()


async def test_a_stream_passes_piece_by_piece_and_its_head_waits_for_the_first() -> None:
    proxy = Proxy()
    rig = Rig(proxy)
    rig.send(GET)
    sink = rig.caller.calls[0].sink
    sink.on_head(SSE_HEAD)
    assert rig.transport.take() == b""
    await asyncio.sleep(2)
    sink.on_data(b"data: 1\n\n")
    assert rig.transport.take().endswith(b"transfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
    exchange = sink
    assert isinstance(exchange, Exchange)
    assert exchange.first_byte_at is not None
    assert exchange.first_byte_at - exchange.received_at == 2
    sink.on_data(b"data: [DONE]\n\n")
    assert rig.transport.take() == b"e\r\ndata: [DONE]\n\n\r\n"
    sink.on_done()
    assert rig.transport.take() == b"0\r\n\r\n"
    await rig.finish()


async def test_a_stream_to_an_http_10_client_is_not_chunked_and_ends_with_the_connection() -> None:
    rig = Rig(Proxy())
    rig.send(GET_10.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"))
    rig.caller.calls[0].answer(SSE_HEAD, b"data: 1\n\n", b"data: 2\n\n")
    reply = rig.transport.take()
    assert b"chunked" not in reply
    assert b"connection: close\r\n" in reply
    assert reply.endswith(b"\r\n\r\ndata: 1\n\ndata: 2\n\n")
    assert rig.transport.is_closing()
    await rig.finish()


@pytest.mark.parametrize("head", [ResponseHead(204, [], None), ResponseHead(304, [(b"etag", b"x")], None), ResponseHead(200, [], 0)])
async def test_an_answer_without_a_body_passes_with_its_head_alone(head: ResponseHead) -> None:
    rig = Rig(Proxy())
    rig.send(GET)
    rig.caller.calls[0].answer(head)
    reply = rig.transport.take()
    assert reply.endswith(b"\r\n\r\n")
    assert b"chunked" not in reply
    assert (b"content-length: 0" in reply) is (head.status == 200)
    await rig.finish()


async def test_an_error_of_the_upstream_reaches_the_handler_and_not_the_client() -> None:
    proxy = Proxy(react=lambda exchange, end: exchange.reply(400, [(b"x", b"y")], b"ours: " + end.refusal))
    rig = Rig(proxy)
    rig.send(GET)
    rig.caller.calls[0].answer(ResponseHead(422, [], None), b"theirs ", b"all")
    assert rig.transport.take().endswith(b"ours: theirs all")
    assert [(end.outcome, end.status) for end in proxy.ends] == [(Outcome.REFUSED, 422)]
    await rig.finish()


@pytest.mark.parametrize("has_head", [False, True])
async def test_before_the_first_byte_the_handler_may_try_elsewhere(has_head: bool) -> None:
    proxy = Proxy()
    proxy.react = lambda exchange, end: proxy.start(exchange) if end.outcome is Outcome.UNREACHED else None
    rig = Rig(proxy)
    rig.send(GET)
    if has_head:
        rig.caller.calls[0].sink.on_head(SSE_HEAD)
    rig.caller.calls[0].sink.on_failure(LOST)
    rig.caller.calls[1].answer(JSON_HEAD, b"1234")
    assert rig.transport.take().endswith(b"1234")
    assert [end.outcome for end in proxy.ends] == [Outcome.UNREACHED, Outcome.DONE]
    assert proxy.ends[0].failure == LOST
    await rig.finish()


@pytest.mark.parametrize(("last", "gap"), [(b"data: 1\n\n", b""), (b"data: 1\r\n\r\n", b""), (b'data: {"id', b"\n\n")])
async def test_a_stream_that_breaks_ends_with_an_error_event_and_a_closed_connection(last: bytes, gap: bytes) -> None:
    proxy = Proxy()
    rig = Rig(proxy)
    rig.send(GET + GET)
    sink = rig.caller.calls[0].sink
    sink.on_head(SSE_HEAD)
    sink.on_data(last)
    rig.transport.take()
    sink.on_failure(LOST)
    size, _, rest = rig.transport.take().partition(b"\r\n")
    event, end = rest[: int(size, 16)], rest[int(size, 16) :]
    assert event.startswith(gap + b'data: {"error":{')
    assert b'"code":"upstream_disconnected"' in event
    assert event.endswith(b"}}\n\n")
    assert end == b"\r\n0\r\n\r\n"
    assert rig.transport.is_closing()
    assert [end.outcome for end in proxy.ends] == [Outcome.BROKEN]
    assert len(rig.caller.calls) == 1
    await rig.finish()


async def test_a_stream_that_breaks_tells_so_in_the_shape_of_its_api() -> None:
    class Anthropic(Proxy):
        def handle(self, exchange: Exchange) -> None:
            exchange.error_shape = ANTHROPIC
            self.start(exchange)

    rig = Rig(Anthropic())
    rig.send(GET)
    sink = rig.caller.calls[0].sink
    sink.on_head(SSE_HEAD)
    sink.on_data(b"event: x\ndata: 1\n\n")
    sink.on_failure(LOST)
    assert b'event: error\ndata: {"type":"error"' in rig.transport.take()
    await rig.finish()


@pytest.mark.parametrize("head", [JSON_HEAD, ResponseHead(200, [(b"content-type", b"application/json")], None)])
async def test_any_other_body_that_breaks_is_cut_so_that_its_framing_shows_it(head: ResponseHead) -> None:
    rig = Rig(Proxy())
    rig.send(GET)
    sink = rig.caller.calls[0].sink
    sink.on_head(head)
    sink.on_data(b"{")
    sink.on_failure(LOST)
    assert not rig.transport.take().endswith(b"0\r\n\r\n")
    assert rig.transport.is_closing()
    await rig.finish()


async def test_a_watcher_that_fails_costs_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail(exchange: Exchange, end: Forwarded) -> None:
        raise KeyError("a bug")

    rig = Rig(Proxy(react=fail))
    rig.send(GET)
    with caplog.at_level(logging.ERROR):
        rig.caller.calls[0].sink.on_failure(LOST)
    assert rig.transport.take().startswith(b"HTTP/1.1 500 ")
    rig.send(GET)
    rig.caller.calls[1].answer(JSON_HEAD, b"1234")
    assert rig.transport.take().endswith(b"1234")
    assert caplog.text.count("the watcher of a forward failed") == 2
    await rig.finish()


async def test_two_answers_to_one_request_are_a_mistake_that_is_named() -> None:
    class Hasty(Proxy):
        def handle(self, exchange: Exchange) -> None:
            self.start(exchange)
            with pytest.raises(RuntimeError, match="a forward is under way"):
                exchange.reply(200)
            with pytest.raises(RuntimeError, match="a forward is under way"):
                self.start(exchange)

    rig = Rig(Hasty())
    rig.send(GET)
    rig.caller.calls[0].answer(JSON_HEAD, b"1234")
    assert rig.transport.take().count(b"HTTP/1.1") == 1
    await rig.finish()


# Draining.


async def test_draining_closes_what_waits_and_ends_what_works_behind_its_answer() -> None:
    rig = Rig(Proxy())
    waiting = rig.connect()
    rig.send(GET + GET)
    rig.hub.is_draining = True
    for front in list(rig.hub.fronts):
        front.drain()
    assert waiting.is_closing()
    assert not rig.transport.is_closing()
    rig.caller.calls[0].answer(JSON_HEAD, b"1234")
    assert b"connection: close\r\n" in rig.transport.take()
    assert rig.transport.is_closing()
    assert len(rig.caller.calls) == 1
    await rig.finish()


# Any order of events.

event = st.sampled_from(["get", "post", "part", "rest", "head", "data", "done", "fail", "pause", "resume", "tick", "eof"])


@given(st.lists(event, max_size=30))
def test_whatever_happens_the_counts_hold_and_return_to_zero(events: list[str]) -> None:
    run_in_new_loop(_play(events))


async def _play(events: list[str]) -> None:
    proxy = Proxy()
    proxy.react = lambda exchange, end: exchange.reply(503) if end.outcome in (Outcome.UNREACHED, Outcome.REFUSED) else None
    rig = Rig(proxy)
    live: list[FakeCall] = []
    has_head = False
    for name in events:
        live = [call for call in rig.caller.calls if call.sink._call is call]  # type: ignore[attr-defined]
        call = live[-1] if live else None
        if rig.transport.is_closing():
            break
        if name in ("get", "post", "part", "rest"):
            rig.send({"get": GET, "post": POST, "part": POST[:30], "rest": POST[30:]}[name])
        elif name == "pause":
            rig.front.pause_writing()
        elif name == "resume" and rig.front.is_write_paused:
            rig.front.resume_writing()
        elif name == "tick":
            await asyncio.sleep(0)
        elif name == "eof":
            rig.transport.lose()
        elif call is not None:
            has_head = call.sink._head is not None  # type: ignore[attr-defined]
            if name == "head" and not has_head:
                call.sink.on_head(SSE_HEAD)
            elif name == "data" and has_head:
                call.sink.on_data(b"data: 1\n\n")
            elif name == "done" and has_head:
                call.sink.on_done()
            elif name == "fail":
                call.sink.on_failure(LOST)
        rig.hub.check_integrity()
        assert rig.hub.n_in_flight <= 1
    await rig.finish()
    n_started = len(rig.caller.calls)
    assert len(proxy.ends) == n_started
    abandoned = [end for end in proxy.ends if end.outcome is Outcome.ABANDONED]
    assert sum(call.is_cancelled for call in rig.caller.calls) == len(abandoned)


async def test_the_date_is_made_once_a_second() -> None:
    rig = Rig(Echo())
    first = rig.hub.date()
    assert first.startswith(b"date: ")
    assert rig.hub.date() is first
    await asyncio.sleep(1)
    assert rig.hub.date() is not first
    await rig.finish()
