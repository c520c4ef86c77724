"""A client's connection: replies in order, bad input, limits and time-outs, the last under virtual time."""

import asyncio
import logging

import pytest

from aerostat_core.api_errors import model_waking
from aerostat_router.http.exchange import Exchange, Outcome
from aerostat_router.http.settings import FrontSettings
from aerostat_testing.front_rig import (
    GET,
    GET_10,
    POST,
    SSE_HEAD,
    Broken,
    Echo,
    Holder,
    Proxy,
    Rig,
    without_date,
)

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]


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
    holder = Holder()
    rig = Rig(holder)
    rig.send(GET + POST, GET)
    assert [exchange.request.path for exchange in holder.held] == [b"/a"]
    holder.held[0].reply(200, (), b"1")
    assert [exchange.request.path for exchange in holder.held] == [b"/a", b"/b"]
    holder.held[1].reply(200, (), b"2")
    holder.held[2].reply(204)
    assert rig.transport.take().count(b"HTTP/1.1 20") == 3
    await rig.finish()


async def test_bytes_behind_a_request_under_way_stop_being_read_past_a_bound() -> None:
    holder = Holder()
    rig = Rig(holder, FrontSettings(max_held_bytes=100))
    is_reading = [rig.transport.is_reading_now]
    for pieces in ((GET, GET * 3), (GET,)):
        rig.send(*pieces)
        is_reading.append(rig.transport.is_reading_now)
    for i in range(5):
        holder.held[i].reply(204)
    is_reading.append(rig.transport.is_reading_now)
    assert is_reading == [True, True, False, True]
    await rig.finish()


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body_have_neither_length_nor_body(status: int) -> None:
    holder = Holder()
    rig = Rig(holder)
    rig.send(GET)
    holder.held[0].reply(status, (), b"ignored")
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
    holder = Holder()
    rig = Rig(holder)
    head, body = POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n").split(b"\r\n\r\n")
    assert rig.send(GET + head + b"\r\n\r\n") == b""
    holder.held[0].reply(204)
    assert rig.transport.take().endswith(b"\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
    rig.send(body)
    holder.held[1].reply(204)
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
    holder = Holder()
    rig = Rig(holder, FrontSettings(head_timeout_s=1, body_timeout_s=1, idle_timeout_s=1, stall_timeout_s=1))
    rig.send(GET)
    await asyncio.sleep(100)
    holder.held[0].reply_error(model_waking("m", retry_after=2))
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
