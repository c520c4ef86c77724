"""Deadlines of calls to an upstream, under virtual time, and the form of a call that is awaited."""

import asyncio
from dataclasses import dataclass

import pytest

from aerostat_router.http.answer import UpstreamError, open_answer
from aerostat_router.http.settings import UpstreamSettings
from aerostat_router.http.stream_call import Call, Endpoint, FailureKind
from aerostat_router.http.upstream import Pool, UpstreamConnection
from aerostat_testing.loops import on_both_loops
from aerostat_testing.raw_http import FakeTransport, Peer, raw_server
from aerostat_testing.stream_recorder import CHUNKED, OK, POST, Recorder, sending, settle

pytestmark = pytest.mark.cpu


# Time, under a virtual clock, on a transport without a socket.


@dataclass
class Started:
    """A pool whose only connection has just been idle, and a call on it."""

    pool: Pool
    transport: FakeTransport
    connection: UpstreamConnection
    recorder: Recorder

    @property
    def call(self) -> Call:
        return self.pool.active_calls()[0]


async def started(settings: UpstreamSettings, head_timeout_s: float) -> Started:
    pool, first, recorder = Pool(settings), Recorder(), Recorder()
    endpoint = Endpoint("engine", 1)
    connection = UpstreamConnection(pool, endpoint)
    transport = FakeTransport(connection)
    pool.adopt(connection)
    pool.keep(connection)
    pool.stream_call(endpoint, POST, first)
    connection.data_received(OK)
    assert first.is_done
    pool.stream_call(endpoint, POST, recorder, head_timeout_s=head_timeout_s)
    return Started(pool, transport, connection, recorder)


@pytest.mark.looptime
async def test_a_head_that_does_not_come_times_out() -> None:
    rig = await started(UpstreamSettings(), 5)
    await asyncio.sleep(4.9)
    assert rig.recorder.failure is None
    await asyncio.sleep(0.4)
    assert rig.recorder.failed_with(FailureKind.HEAD_TIMEOUT, "no answer within 5 s")
    assert rig.transport.was_aborted
    await rig.pool.close()


@pytest.mark.looptime
async def test_a_stream_that_falls_silent_times_out_and_one_that_is_slow_does_not() -> None:
    rig = await started(UpstreamSettings(stream_idle_timeout_s=30), 5)
    rig.connection.data_received(CHUNKED)
    for _ in range(3):
        await asyncio.sleep(29)
        rig.connection.data_received(b"1\r\na\r\n")
    assert rig.recorder.failure is None
    await asyncio.sleep(30.3)
    assert rig.recorder.failed_with(FailureKind.IDLE_TIMEOUT, "no byte for 30 s")
    await rig.pool.close()


@pytest.mark.looptime
async def test_a_paused_call_does_not_time_out() -> None:
    rig = await started(UpstreamSettings(stream_idle_timeout_s=30), 5)
    rig.connection.data_received(CHUNKED)
    rig.call.pause()
    assert not rig.transport.is_reading_now
    await asyncio.sleep(100)
    assert rig.recorder.failure is None
    rig.call.resume()
    await asyncio.sleep(30.3)
    assert rig.recorder.failed_with(FailureKind.IDLE_TIMEOUT, "no byte for 30 s")
    await rig.pool.close()


@pytest.mark.looptime
async def test_an_idle_connection_is_closed_before_the_engine_would() -> None:
    rig = await started(UpstreamSettings(keep_idle_s=4), 5)
    rig.connection.data_received(OK)
    assert rig.pool.n_idle == 1
    await asyncio.sleep(4.3)
    assert rig.transport.is_closing()
    assert rig.pool.n_idle == 0
    rig.pool.check_integrity()
    await rig.pool.close()


@pytest.mark.looptime
async def test_connecting_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*args: object) -> None:
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "create_connection", never)
    pool, recorder = Pool(UpstreamSettings(connect_timeout_s=3)), Recorder()
    begun = loop.time()
    pool.stream_call(Endpoint("engine", 1), POST, recorder)
    await recorder.wait()
    assert loop.time() - begun == 3
    assert recorder.failed_with(FailureKind.CONNECT_TIMEOUT, "engine:1 did not accept within 3 s")
    assert pool.n_active == 0
    await pool.close()


# The form to await.


@on_both_loops
async def test_an_answer_can_be_read_as_events_chunks_or_whole() -> None:
    stream = b"data: one\n\ndata: two\n\ndata: [DONE]\n\n"

    async def script(peer: Peer) -> None:
        while True:
            await peer.read_message()
            await peer.send(
                CHUNKED, *[b"1\r\n%c\r\n" % byte for byte in stream[:12]], b"%x\r\n%b\r\n0\r\n\r\n" % (len(stream) - 12, stream[12:])
            )

    async with raw_server(script) as server:
        pool, endpoint = Pool(), Endpoint("127.0.0.1", server.port)
        async with open_answer(pool, endpoint, POST) as answer:
            assert answer.status == 200
            assert [event async for event in answer.events()] == [b"one", b"two", b"[DONE]"]
        async with open_answer(pool, endpoint, POST) as answer:
            assert await answer.read(1000) == stream
        async with open_answer(pool, endpoint, POST) as answer:
            with pytest.raises(ValueError, match="larger than 10 bytes"):
                await answer.read(10)
        assert server.n_accepted == 1
        await settle(pool)
        await pool.close()


@on_both_loops
async def test_leaving_the_block_early_cancels_the_call() -> None:
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(CHUNKED + b"2\r\nab\r\n")
        await peer.wait_until_gone()
        gone.set()

    async with raw_server(script) as server:
        pool = Pool()
        async with open_answer(pool, Endpoint("127.0.0.1", server.port), POST) as answer:
            async for piece in answer.chunks():
                assert piece == b"ab"
                break
        async with asyncio.timeout(2):
            await gone.wait()
        await settle(pool)
        await pool.close()


@on_both_loops
async def test_what_came_before_a_break_is_given_before_the_error() -> None:
    async with raw_server(sending(CHUNKED + b"2\r\nab\r\n")) as server:
        pool, pieces = Pool(), []
        async with open_answer(pool, Endpoint("127.0.0.1", server.port), POST) as answer:
            with pytest.raises(UpstreamError, match="closed the connection") as raised:
                pieces.extend([piece async for piece in answer.chunks()])
        assert raised.value.failure.kind is FailureKind.DISCONNECTED
        with pytest.raises(UpstreamError):
            async with open_answer(pool, Endpoint("127.0.0.1", 1), POST):
                pass
        await settle(pool)
        await pool.close()


@on_both_loops
async def test_a_slow_reader_holds_the_upstream_back() -> None:
    n_bytes, written = 32 << 20, 0

    async def script(peer: Peer) -> None:
        nonlocal written
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % n_bytes)
        while written < n_bytes:
            await peer.send(bytes(1 << 20))
            written += 1 << 20

    async with raw_server(script) as server:
        pool, got = Pool(), 0
        async with open_answer(pool, Endpoint("127.0.0.1", server.port), POST) as answer:
            await asyncio.sleep(0.2)
            assert written < n_bytes
            async for piece in answer.chunks():
                got += len(piece)
        assert got == n_bytes
        await pool.close()
