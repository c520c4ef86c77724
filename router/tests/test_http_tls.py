"""Calls of engines by TLS: who is believed, how a handshake fails, what a renewal changes."""

import asyncio
import ssl
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from aerostat_core import peers
from aerostat_router.http.settings import UpstreamSettings
from aerostat_router.http.stream_call import Endpoint, FailureKind
from aerostat_router.http.upstream import Pool
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.certificates import EXPIRED, Authority
from aerostat_testing.loops import on_both_loops
from aerostat_testing.raw_http import Peer, RawServer, raw_server
from aerostat_testing.stream_recorder import CHUNKED, POST, Recorder, answer_ok, call_once, settle

pytestmark = pytest.mark.cpu


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def router(authority: Authority, tmp_path: Path) -> Path:
    return authority.issue(tmp_path / "router", peers.ROUTER)


@pytest.fixture
def engine(authority: Authority, tmp_path: Path) -> Path:
    return authority.issue(tmp_path / "engine", peers.ENGINES)


def serving(folder: Path) -> AbstractAsyncContextManager[RawServer]:
    return raw_server(answer_ok, TlsFolder(folder).server_context())


async def failure_of(tls: TlsFolder, port: int) -> tuple[FailureKind, str]:
    pool = Pool(tls=tls)
    got = await call_once(pool, port)
    assert got.failure is not None
    assert not got.heads
    await settle(pool)
    assert pool.n_idle == 0
    await pool.close()
    return got.failure.kind, got.failure.detail


@on_both_loops
async def test_an_upstream_that_proves_to_be_no_engine_gets_no_byte_of_a_call(authority: Authority, router: Path, tmp_path: Path) -> None:
    agent = authority.issue(tmp_path / "agent", peers.AGENT)
    stranger = Authority().issue(tmp_path / "stranger", peers.ENGINES, also_trusts=[authority])
    late = authority.issue(tmp_path / "late", peers.ENGINES, until=EXPIRED)
    for folder, why in ((agent, "Hostname mismatch"), (stranger, "certificate verify failed"), (late, "expired")):
        async with serving(folder) as server:
            kind, detail = await failure_of(TlsFolder(router), server.port)
        assert kind is FailureKind.CONNECT
        assert detail.startswith(f"no TLS with 127.0.0.1:{server.port} as engines.aerostat.internal: ")
        assert why in detail
        assert server.n_accepted == 0  # connections that the script saw


@on_both_loops
async def test_an_engine_that_speaks_plain_http_is_not_called(router: Path) -> None:
    async def answer_plainly(peer: Peer) -> None:
        await peer.reader.readexactly(1)
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await peer.wait_until_gone()

    async with raw_server(answer_plainly) as server:
        kind, detail = await failure_of(TlsFolder(router), server.port)
        assert kind is FailureKind.CONNECT
        assert "no TLS with" in detail


@on_both_loops
async def test_an_engine_that_refuses_our_certificate_breaks_the_call_before_it_answers(
    authority: Authority, engine: Path, tmp_path: Path
) -> None:
    stranger = TlsFolder(Authority().issue(tmp_path / "stranger", peers.ROUTER, also_trusts=[authority]))
    async with serving(engine) as server:
        kind, detail = await failure_of(stranger, server.port)
        assert kind is FailureKind.DISCONNECTED
        assert "perhaps it refuses this router's certificate" in detail
        assert server.n_accepted == 0


@on_both_loops
async def test_a_handshake_that_does_not_end_is_a_connect_time_out(router: Path) -> None:
    async def say_nothing(peer: Peer) -> None:
        await peer.wait_until_gone()

    async with raw_server(say_nothing) as server:
        pool = Pool(UpstreamSettings(connect_timeout_s=0.1), TlsFolder(router))
        got = await call_once(pool, server.port)
        assert got.failure is not None
        assert got.failure.kind is FailureKind.CONNECT_TIMEOUT
        await settle(pool)
        await pool.close()


@on_both_loops
async def test_a_stream_goes_on_while_everything_is_renewed_and_new_connections_use_what_is_new(router: Path, engine: Path) -> None:
    renewed = asyncio.Event()
    seen: list[dict[str, object]] = []

    async def script(peer: Peer) -> None:
        of_client: ssl.SSLObject = peer.writer.get_extra_info("ssl_object")
        seen.append({"certificate": of_client.getpeercert(binary_form=True)})
        await peer.read_message()
        await peer.send(CHUNKED + b"2\r\nab\r\n")
        await renewed.wait()
        await peer.send(b"2\r\ncd\r\n0\r\n\r\n")
        await peer.wait_until_gone()

    async with raw_server(script, TlsFolder(engine).server_context()) as server:
        pool, stream = Pool(tls=TlsFolder(router)), Recorder()
        pool.stream_call(Endpoint("127.0.0.1", server.port), POST, stream)
        await stream.wait_for_bytes(2)
        successor = Authority()
        successor.issue(engine, peers.ENGINES)
        successor.issue(router, peers.ROUTER)
        second = Recorder()
        pool.stream_call(Endpoint("127.0.0.1", server.port), POST, second)
        await second.wait_for_bytes(2)
        renewed.set()
        assert (await stream.wait()).body == (await second.wait()).body == b"abcd"
        assert seen[0] != seen[1]
        assert pool.n_idle == 2  # kept connections go on as well
        await pool.close()
