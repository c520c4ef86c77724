"""The suite that every adapter of `stream_call` passes: here the pool, over real sockets, plain and by TLS, on both loops,
against a raw upstream."""

import asyncio
from pathlib import Path

import pytest

from aerostat_router.http.settings import UpstreamSettings
from aerostat_router.http.stream_call import Call, CallRequest, Endpoint, FailureKind
from aerostat_router.http.upstream import Pool
from aerostat_testing.loops import on_both_loops
from aerostat_testing.raw_http import WAIT_S, Peer, RawMessage
from aerostat_testing.stream_recorder import CHUNKED, OK, POST, Recorder, Wire, answer_ok, call_once, sending, settle

pytestmark = pytest.mark.cpu


@pytest.fixture(params=["plain", "tls"])
def wire(request: pytest.FixtureRequest, tmp_path: Path) -> Wire:
    return Wire() if request.param == "plain" else Wire.by_tls(tmp_path)


@on_both_loops
async def test_the_request_is_written_as_asked_and_the_answer_comes_back(wire: Wire) -> None:
    seen: list[RawMessage] = []

    async def script(peer: Peer) -> None:
        seen.append(await peer.read_message())
        await peer.send(OK)

    async with wire.server(script) as server:
        pool = wire.pool()
        got = await call_once(pool, server.port)
        assert (got.heads[0].status, got.body, got.is_done) == (200, b"ok", True)
        headers = {"host": f"127.0.0.1:{server.port}", "x-a": "b", "content-length": "5"}
        assert seen == [RawMessage(start="POST /v1/x HTTP/1.1", headers=headers, body=b"hello")]
        await pool.close()


@on_both_loops
async def test_a_connection_is_used_again_and_the_last_used_first(wire: Wire) -> None:
    async with wire.server(answer_ok) as server:
        pool = wire.pool()
        for _ in range(3):
            await call_once(pool, server.port)
        assert (server.n_accepted, pool.n_idle) == (1, 1)
        await asyncio.gather(*[call_once(pool, server.port) for _ in range(4)])
        assert (server.n_accepted, pool.n_idle) == (4, 4)
        pool.check_integrity()
        await pool.close()
        assert pool.n_idle == 0
        pool.check_integrity()


@on_both_loops
async def test_a_call_may_be_started_from_the_end_of_another(wire: Wire) -> None:
    async with wire.server(answer_ok) as server:
        pool, second = wire.pool(), Recorder()
        endpoint = Endpoint("127.0.0.1", server.port)
        first = Recorder(then=lambda: start(second))

        def start(recorder: Recorder) -> None:
            pool.stream_call(endpoint, POST, recorder)

        pool.stream_call(endpoint, POST, first)
        assert (await second.wait()).is_done
        assert server.n_accepted == 1
        await pool.close()


@on_both_loops
async def test_idle_connections_are_bounded(wire: Wire) -> None:
    async with wire.server(answer_ok) as server:
        pool = wire.pool(UpstreamSettings(max_idle_connections=2))
        await asyncio.gather(*[call_once(pool, server.port) for _ in range(5)])
        assert pool.n_idle == 2
        await pool.close()


@on_both_loops
async def test_no_callback_comes_before_the_call_has_returned(wire: Wire) -> None:
    recorder = Recorder()
    pool = wire.pool()
    call: Call = pool.stream_call(Endpoint("127.0.0.1", 1), POST, recorder)
    assert not recorder.ended.is_set()
    got = await recorder.wait()
    assert got.failure is not None
    assert got.failure.kind is FailureKind.CONNECT
    assert "127.0.0.1:1 refused" in got.failure.detail
    call.cancel()
    call.pause()
    call.resume()
    await pool.close()


@on_both_loops
async def test_a_stale_connection_is_replaced_once_without_the_sink_noticing(wire: Wire) -> None:
    n_requests = 0

    async def script(peer: Peer) -> None:
        nonlocal n_requests
        await peer.read_message()
        n_requests += 1
        await peer.send(OK)
        await peer.read_message()  # the second request on this connection is taken, and never answered
        peer.reset()

    async with wire.server(script) as server:
        pool = wire.pool()
        for _ in range(4):
            assert (await call_once(pool, server.port)).body == b"ok"
        assert (server.n_accepted, n_requests) == (4, 4)
        await pool.close()


@on_both_loops
async def test_a_fresh_connection_that_breaks_is_not_tried_again(wire: Wire) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_message()
        peer.reset()

    async with wire.server(script) as server:
        pool = wire.pool()
        got = await call_once(pool, server.port)
        assert got.failure is not None
        assert got.failure.kind is FailureKind.DISCONNECTED
        assert server.n_accepted == 1
        await settle(pool)
        await pool.close()


@on_both_loops
async def test_a_connection_that_breaks_after_a_byte_is_not_tried_again(wire: Wire) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(OK)
        await peer.read_message()
        await peer.send(b"H")

    async with wire.server(script) as server:
        pool = wire.pool()
        assert (await call_once(pool, server.port)).is_done
        got = await call_once(pool, server.port)
        assert got.failure is not None
        assert got.failure.kind is FailureKind.DISCONNECTED
        assert server.n_accepted == 1
        await pool.close()


@pytest.mark.parametrize(
    ("pieces", "body", "kind"),
    [
        pytest.param([CHUNKED, b"2\r\nab\r\n", b"0\r\n\r\n"], b"ab", None, id="chunks"),
        pytest.param([CHUNKED + b"2;e=1\r\nab\r\n0\r\nX-T: 1\r\n\r\n"], b"ab", None, id="extension and trailer"),
        pytest.param([b"HTTP/1.1 100 Continue\r\n\r\n", OK], b"ok", None, id="interim answer"),
        pytest.param([b"HTTP/1.1 200 OK\r\n\r\n", b"until", b" the end"], b"until the end", None, id="body that ends with the connection"),
        pytest.param([b"HTTP/1.1 204 None\r\n\r\n"], b"", None, id="no body"),
        pytest.param([OK + b"surplus"], b"ok", None, id="surplus"),
        pytest.param([b"HTTP/1.0 200 OK\r\n\r\nold"], b"old", None, id="HTTP/1.0"),
        pytest.param([OK[:-1]], b"o", FailureKind.DISCONNECTED, id="length not reached"),
        pytest.param([CHUNKED + b"5\r\nab"], b"ab", FailureKind.DISCONNECTED, id="end inside a chunk"),
        pytest.param([CHUNKED + b"2\r\nab\r\n"], b"ab", FailureKind.DISCONNECTED, id="no last chunk"),
        pytest.param([b"HTTP/1.1 200"], b"", FailureKind.DISCONNECTED, id="end inside the head"),
        pytest.param([b"nonsense\r\n\r\n"], b"", FailureKind.PROTOCOL, id="another protocol"),
        pytest.param([CHUNKED + b"2\r\nab\r\nxyz"], b"ab", FailureKind.PROTOCOL, id="broken chunk"),
        pytest.param([b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000], b"", FailureKind.PROTOCOL, id="endless head"),
    ],
)
async def test_every_end_is_told_as_what_it_is(pieces: list[bytes], body: bytes, kind: FailureKind | None, wire: Wire) -> None:
    async with wire.server(sending(*pieces)) as server:
        pool = wire.pool()
        got = await call_once(pool, server.port)
        assert got.body in (body, b"") if kind is FailureKind.PROTOCOL else got.body == body
        assert (got.failure.kind if got.failure else None) is kind
        assert got.is_done is (kind is None)
        await settle(pool)
        await pool.close()


@on_both_loops
async def test_a_reset_ends_no_body_well(wire: Wire) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nopen end")
        await asyncio.sleep(0.05)
        peer.reset()

    async with wire.server(script) as server:
        pool = wire.pool()
        got = await call_once(pool, server.port)
        assert got.body == b"open end"
        assert got.failure is not None
        assert got.failure.kind is FailureKind.DISCONNECTED
        await pool.close()


@on_both_loops
async def test_head_is_answered_by_its_head(wire: Wire) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        await peer.wait_until_gone()

    async with wire.server(script) as server:
        pool = wire.pool()
        got = await call_once(pool, server.port, CallRequest(b"HEAD", b"/"))
        assert (got.heads[0].content_length, got.body, got.is_done) == (1000, b"", True)
        assert pool.n_idle == 0
        await pool.close()


@on_both_loops
async def test_cancel_closes_the_connection_at_once_and_nothing_is_told(wire: Wire) -> None:
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(CHUNKED + b"2\r\nab\r\n")
        await peer.wait_until_gone()
        gone.set()

    async with wire.server(script) as server:
        pool, recorder = wire.pool(), Recorder()
        call = pool.stream_call(Endpoint("127.0.0.1", server.port), POST, recorder)
        await recorder.wait_for_bytes(2)
        call.cancel()
        async with asyncio.timeout(2):
            await gone.wait()
        assert not recorder.ended.is_set()
        await settle(pool)
        assert pool.n_idle == 0
        await pool.close()


@on_both_loops
async def test_cancel_while_connecting_leaves_nothing(wire: Wire) -> None:
    async with wire.server(answer_ok) as server:
        pool, recorder = wire.pool(), Recorder()
        for n_turns in range(8):
            call = pool.stream_call(Endpoint("127.0.0.1", server.port), POST, recorder)
            for _ in range(n_turns):
                await asyncio.sleep(0)
            if recorder.heads:
                break
            call.cancel()
            await settle(pool)
        await pool.close()
        pool.check_integrity()


@on_both_loops
async def test_a_paused_call_holds_the_upstream_back_and_loses_nothing(wire: Wire) -> None:
    n_bytes = 32 << 20
    written = 0

    async def script(peer: Peer) -> None:
        nonlocal written
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % n_bytes)
        while written < n_bytes:
            await peer.send(bytes(1 << 20))
            written += 1 << 20

    async with wire.server(script) as server:
        pool, recorder = wire.pool(), Recorder()
        call = pool.stream_call(Endpoint("127.0.0.1", server.port), POST, recorder)
        call.pause()  # before the connection is there
        await asyncio.sleep(0.2)
        assert written < n_bytes
        assert not recorder.heads
        call.resume()
        await recorder.wait_for_bytes(1)
        call.pause()
        await asyncio.sleep(0.1)
        before = len(recorder.body)
        await asyncio.sleep(0.1)
        assert len(recorder.body) == before < n_bytes
        call.resume()
        await recorder.wait()
        assert len(recorder.body) == n_bytes
        await pool.close()


@on_both_loops
async def test_a_large_body_arrives_whole_and_an_early_answer_does_not_lend_the_connection(wire: Wire) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Large\r\nContent-Length: 0\r\n\r\n")
        await asyncio.sleep(0.1)

    async with wire.server(script) as server:
        pool = wire.pool()
        got = await call_once(pool, server.port, CallRequest(b"POST", b"/", (), bytes(64 << 20)))
        assert got.heads[0].status == 413
        assert pool.n_idle == 0
        await pool.close()

    seen: list[int] = []

    async def take_all(peer: Peer) -> None:
        seen.append(len((await peer.read_message()).body))
        await peer.send(OK)

    async with wire.server(take_all) as server:
        pool = wire.pool()
        await call_once(pool, server.port, CallRequest(b"POST", b"/", (), bytes(5 << 20)))
        assert seen == [5 << 20]
        await pool.close()


@on_both_loops
async def test_bytes_that_nobody_asked_for_end_an_idle_connection(wire: Wire) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(OK)
        await asyncio.sleep(0.02)
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await peer.wait_until_gone()

    async with wire.server(script) as server:
        pool = wire.pool()
        await call_once(pool, server.port)
        async with asyncio.timeout(WAIT_S):
            while pool.n_idle:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.005)
        assert (await call_once(pool, server.port)).body == b"ok"
        await pool.close()


@on_both_loops
async def test_forgetting_an_endpoint_closes_what_is_idle_there(wire: Wire) -> None:
    async with wire.server(answer_ok) as server:
        pool = wire.pool()
        await call_once(pool, server.port)
        pool.forget(Endpoint("127.0.0.1", server.port))
        pool.forget(Endpoint("127.0.0.1", 1))
        assert pool.n_idle == 0
        await pool.close()


@pytest.mark.parametrize(
    "request_",
    [
        CallRequest(b"GET", b"/a b"),
        CallRequest(b"GET", b"/a\r\nHost: evil"),
        CallRequest(b"GET", b"a"),
        CallRequest(b"GET", b"/", ((b"x", b"a\r\nhost: evil"),)),
        CallRequest(b"GET", b"/", ((b"x\r\ny", b"a"),)),
    ],
)
async def test_a_request_that_could_be_two_is_never_sent(request_: CallRequest) -> None:
    pool = Pool()
    with pytest.raises(ValueError, match=r"not a path|CR, LF or NUL"):
        pool.stream_call(Endpoint("127.0.0.1", 1), request_, Recorder())
    assert pool.n_active == 0
    await pool.close()
