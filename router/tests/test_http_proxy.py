"""Client, front, pool and a raw upstream over real sockets: what passes through, and what happens when either side misbehaves."""

import asyncio
import errno
import itertools
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerostat_core.addresses import Address
from aerostat_core.errors import SettingError
from aerostat_router.http.exchange import Outcome
from aerostat_router.http.server import HttpServer
from aerostat_router.http.settings import FrontSettings, ListenSettings
from aerostat_testing.loops import on_both_loops, run_in_new_loop
from aerostat_testing.proxy_rig import POST, SSE, chunk, echo, rig, sized
from aerostat_testing.raw_http import WAIT_S, Peer, connect

pytestmark = pytest.mark.cpu


@on_both_loops
async def test_a_request_passes_through_and_comes_back_with_our_headers() -> None:
    async with rig(echo) as r, connect(r.port) as client:
        for _ in range(3):
            await client.send(POST.replace(b"Host", b"X-Request-Id: abc\r\nHost"))
            reply = await client.read_message()
            assert (reply.status, reply.headers["x-request-id"]) == (200, "abc")
            assert json.loads(reply.body) == ["POST /v1/x?q=1 HTTP/1.1", "127.0.0.1", "hello"]
        assert r.upstream.n_accepted == 1
        assert [end.outcome for end in r.proxy.ends] == [Outcome.DONE] * 3


@on_both_loops
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with rig(echo) as r, connect(r.port) as client:
        await client.send(b"".join(POST.replace(b"hello", b"%05d" % i) for i in range(20)))
        for i in range(20):
            assert json.loads((await client.read_message()).body)[2] == f"{i:05d}"


@on_both_loops
async def test_every_piece_of_a_stream_passes_as_it_comes() -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(SSE)
        for i in range(5):
            await peer.send(chunk(b"data: %d\n\n" % i))
            async with asyncio.timeout(WAIT_S):
                await go.wait()
            go.clear()
        await peer.send(b"0\r\n\r\n")

    async with rig(script) as r, connect(r.port) as client:
        await client.send(POST)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        for i in range(5):
            assert await client.reader.readuntil(b"\n\n\r\n") == chunk(b"data: %d\n\n" % i)
            go.set()
        assert await client.reader.readexactly(5) == b"0\r\n\r\n"


@settings(max_examples=25, deadline=None)
@given(
    st.binary(max_size=3000),
    st.lists(st.binary(min_size=1, max_size=400), max_size=8),
    st.lists(st.integers(0, 4000), max_size=4),
    st.lists(st.integers(0, 4000), max_size=4),
    st.booleans(),
)
def test_any_body_comes_back_whole_however_both_sides_cut_it(
    body: bytes, answer: list[bytes], client_cuts: list[int], upstream_cuts: list[int], is_chunked: bool
) -> None:
    whole = b"".join(answer)
    response = SSE + b"".join(map(chunk, answer)) + b"0\r\n\r\n" if is_chunked else sized(whole)
    request = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    def cut(data: bytes, at: list[int]) -> list[bytes]:
        edges = [0, *sorted(min(i, len(data)) for i in at), len(data)]
        return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]

    async def play() -> None:
        received: list[bytes] = []

        async def script(peer: Peer) -> None:
            for _ in range(2):
                received.append((await peer.read_message()).body)
                await peer.send(*cut(response, upstream_cuts))

        async with rig(script) as r, connect(r.port) as client:
            for _ in range(2):
                await client.send(*cut(request, client_cuts))
                assert (await client.read_message()).body == whole
            assert received == [body, body]

    run_in_new_loop(play(), "uvloop")


@on_both_loops
async def test_a_lost_upstream_ends_the_stream_with_an_error_event_and_no_done() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(SSE, chunk(b"data: 1\n\n") + b"10\r\ndata: {")
        peer.reset()

    async with rig(script) as r, connect(r.port) as client:
        await client.send(POST)
        reply = await client.read_message()
        *events, last = reply.body.split(b"\n\n")[:-1]
        assert events[0] == b"data: 1"
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_disconnected"
        assert b"[DONE]" not in reply.body
        assert await client.read_rest() == b""
        assert (await r.proxy.wait()).outcome is Outcome.BROKEN


@on_both_loops
async def test_a_lost_upstream_before_the_first_byte_is_an_answer_of_ours() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_message()
        peer.reset()

    async with rig(script) as r, connect(r.port) as client:
        for _ in range(2):
            await client.send(POST)
            reply = await client.read_message()
            assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, "no_capacity")


@pytest.mark.parametrize("hangs_up", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stage", ["before the head", "in the stream"])
async def test_a_hang_up_reaches_the_upstream_within_two_seconds(hangs_up: str, stage: str) -> None:
    began, gone = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.read_message()
        if stage == "in the stream":
            await peer.send(SSE, chunk(b"data: 1\n\n"))
        began.set()
        await peer.wait_until_gone()
        gone.set()

    async with rig(script) as r, connect(r.port) as client:
        await client.send(POST)
        async with asyncio.timeout(WAIT_S):
            await began.wait()
        if stage == "in the stream":
            await client.reader.readuntil(b"data: 1\n\n\r\n")
        if hangs_up == "reset":
            client.reset()
        elif hangs_up == "half-close":
            client.writer.write_eof()
        else:
            client.writer.close()
        async with asyncio.timeout(2):
            await gone.wait()
        assert (await r.proxy.wait()).outcome is Outcome.ABANDONED


@on_both_loops
async def test_a_slow_reader_holds_the_upstream_back_and_gets_everything() -> None:
    n_bytes, written = 48 << 20, 0

    async def script(peer: Peer) -> None:
        nonlocal written
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % n_bytes)
        while written < n_bytes:
            await peer.send(bytes(1 << 20))
            written += 1 << 20

    async with rig(script) as r, connect(r.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(POST)
        await asyncio.sleep(0.5)
        assert 0 < written < n_bytes
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await client.read_message()).body) == n_bytes


@on_both_loops
async def test_a_large_upload_arrives_whole_and_one_too_large_is_told_so() -> None:
    async with rig(echo, FrontSettings(max_body_bytes=2 << 20)) as r:
        async with connect(r.port) as client:
            body = b"a" * (2 << 20)
            await client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert len(json.loads((await client.read_message()).body)[2]) == len(body)
        async with connect(r.port) as client:
            client.writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(bytes(1 << 20)) * 8)
            reply = await client.read_message()
            assert (reply.status, json.loads(reply.body)["error"]["code"]) == (413, "body_too_large")


@on_both_loops
async def test_a_body_that_is_announced_with_100_continue_is_asked_for() -> None:
    async with rig(echo) as r, connect(r.port) as client:
        head, body = POST.split(b"\r\n\r\n")
        await client.send(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert (await client.read_message(has_body=False)).status == 100
        await client.send(body)
        assert (await client.read_message()).status == 200


@on_both_loops
async def test_head_passes_without_a_body_and_the_connection_lives_on() -> None:
    async def script(peer: Peer) -> None:
        request = await peer.read_message()
        await peer.send(sized(b"body") if request.start.startswith("POST") else b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n")

    async with rig(script) as r, connect(r.port) as client:
        await client.send(b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await client.read_message(has_body=False)).headers["content-length"] == "4"
        await client.send(POST)
        assert (await client.read_message()).body == b"body"


@on_both_loops
async def test_an_http_10_client_gets_a_stream_that_ends_with_its_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(SSE, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), b"0\r\n\r\n")

    async with rig(script) as r, connect(r.port) as client:
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        reply = await client.read_message()
        assert "transfer-encoding" not in reply.headers
        assert reply.body == b"data: 1\n\ndata: 2\n\n"


@on_both_loops
async def test_a_smuggled_request_reaches_nobody() -> None:
    async with rig(echo) as r, connect(r.port) as client:
        await client.send(
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"GET /evil HTTP/1.1\r\nHost: h\r\n\r\n",
        )
        assert (await client.read_message()).status == 400
        assert await client.read_rest() == b""
        assert r.upstream.n_accepted == 0


@on_both_loops
async def test_an_error_body_of_the_upstream_is_not_passed_on_by_itself() -> None:
    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\n{}\n")

    async with rig(script) as r, connect(r.port) as client:
        await client.send(POST)
        assert (await client.read_message()).status == 503
        end = await r.proxy.wait()
        assert (end.outcome, end.status, end.refusal) == (Outcome.REFUSED, 400, b"{}\n")


@on_both_loops
async def test_connections_past_the_limit_are_refused_with_a_reason() -> None:
    limits = FrontSettings(max_connections=2)
    async with rig(echo, limits) as r, connect(r.port) as one, connect(r.port) as two, connect(r.port) as three:
        reply = await three.read_message()
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, "too_many_connections")
        for client in (one, two):
            await client.send(POST)
            assert (await client.read_message()).status == 200


# Listening and draining.


@on_both_loops
async def test_a_busy_port_is_an_error_that_says_what_to_set() -> None:
    async with rig(echo) as r:
        other = HttpServer(r.proxy, r.pool)
        with pytest.raises(
            SettingError, match=rf"cannot listen on 127\.0\.0\.1:{r.port}: another process listens there.*--http-port"
        ) as raised:
            await other.start(ListenSettings(address=Address("127.0.0.1", r.port, "--http-port")))
        assert isinstance(raised.value.__cause__, OSError)
        assert raised.value.__cause__.errno == errno.EADDRINUSE


@on_both_loops
async def test_an_address_of_another_machine_is_told_as_it_is_given() -> None:
    async with rig(echo) as r:
        with pytest.raises(SettingError, match=r"cannot listen on \[2001:db8::1\]:80: .*--http-listen"):
            await HttpServer(r.proxy, r.pool).start(ListenSettings(address=Address.parse("[2001:db8::1]:80", "--http-listen")))


@on_both_loops
async def test_two_servers_share_a_port_where_they_are_told_to() -> None:
    async with rig(echo) as r:
        one, two = HttpServer(r.proxy, r.pool), HttpServer(r.proxy, r.pool)
        port = await one.start(ListenSettings(reuse_port=True))
        assert await two.start(ListenSettings(address=Address("127.0.0.1", port), reuse_port=True)) == port
        assert await one.drain(1) == await two.drain(1) == 0


@on_both_loops
async def test_draining_lets_streams_finish_and_takes_nobody_new() -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(SSE, chunk(b"data: 1\n\n"))
        async with asyncio.timeout(WAIT_S):
            await go.wait()
        await peer.send(chunk(b"data: 2\n\n"), b"0\r\n\r\n")

    async with rig(script) as r, connect(r.port) as busy, connect(r.port) as idle:
        await busy.send(POST)
        await busy.reader.readuntil(b"data: 1\n\n\r\n")
        draining = asyncio.ensure_future(r.server.drain(WAIT_S))
        assert await idle.read_rest() == b""
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the system likes
            await asyncio.open_connection("127.0.0.1", r.port)
        go.set()
        assert (await busy.read_rest()).endswith(chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        assert await draining == 0


@on_both_loops
async def test_what_outlasts_the_grace_is_cut_and_its_upstream_call_with_it() -> None:
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(SSE, chunk(b"data: 1\n\n"))
        await peer.wait_until_gone()
        gone.set()

    async with rig(script) as r, connect(r.port) as client:
        await client.send(POST)
        await client.reader.readuntil(b"data: 1\n\n\r\n")
        assert await r.server.drain(0.05) == 1
        await client.wait_until_gone()
        async with asyncio.timeout(2):
            await gone.wait()


def test_loopback_is_what_is_listened_on_by_default() -> None:
    assert socket.inet_aton(ListenSettings().address.host)[0] == 127
