"""A client's connection whose calls are forwarded: hang-ups, streams that break, draining, and any order of events."""

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_router.http.errors import ANTHROPIC
from aerostat_router.http.exchange import Exchange, Forwarded, Outcome
from aerostat_router.http.messages import ResponseHead
from aerostat_router.http.stream_call import CallRequest
from aerostat_testing.front_rig import (
    ENDPOINT,
    GET,
    GET_10,
    JSON_HEAD,
    LOST,
    POST,
    SSE_HEAD,
    Echo,
    FakeCall,
    Holder,
    Proxy,
    Rig,
)
from aerostat_testing.loops import run_in_new_loop

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]


# Hang-ups.


async def test_a_hang_up_while_held_is_told_once_and_later_verbs_are_harmless() -> None:
    holder, proxy = Holder(), Proxy()
    rig = Rig(holder)
    rig.send(GET)
    exchange = holder.held[0]
    rig.transport.lose()
    await asyncio.sleep(0)
    assert holder.n_gone == 1
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
