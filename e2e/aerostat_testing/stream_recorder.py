"""Calls of an upstream as tests make them: a sink that keeps everything and checks the order."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from aerostat_core import peers
from aerostat_router.http.messages import ResponseHead
from aerostat_router.http.settings import UpstreamSettings
from aerostat_router.http.stream_call import CallRequest, Endpoint, Failure, FailureKind
from aerostat_router.http.upstream import Pool
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.certificates import Authority
from aerostat_testing.raw_http import WAIT_S, Peer, RawServer, Script, raw_server

POST = CallRequest(b"POST", b"/v1/x", ((b"x-a", b"b"),), b"hello")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Recorder:
    """A sink that keeps everything, and checks the order."""

    heads: list[ResponseHead] = field(default_factory=list)
    body: bytes = b""
    n_pieces: int = 0
    failure: Failure | None = None
    is_done: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    then: Callable[[], None] | None = None

    def on_head(self, head: ResponseHead) -> None:
        assert not self.heads
        assert not self.ended.is_set()
        self.heads.append(head)
        self.moved.set()

    def on_data(self, data: bytes) -> None:
        assert self.heads
        assert data
        assert not self.ended.is_set()
        self.body += data
        self.n_pieces += 1
        self.moved.set()

    def on_done(self) -> None:
        assert self.heads
        self._end()
        self.is_done = True

    def on_failure(self, failure: Failure) -> None:
        self._end()
        self.failure = failure

    def _end(self) -> None:
        assert not self.ended.is_set()
        self.ended.set()
        if self.then is not None:
            self.then()

    def failed_with(self, kind: FailureKind, detail: str) -> bool:
        return self.failure == Failure(kind, detail)

    async def wait(self) -> "Recorder":
        async with asyncio.timeout(WAIT_S):
            await self.ended.wait()
        return self

    async def wait_for_bytes(self, n: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.body) < n:
                self.moved.clear()
                await self.moved.wait()


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How the calls of a test travel: plain, or by TLS between a router and an engine of these folders."""

    router: TlsFolder | None = None
    engine: TlsFolder | None = None

    @classmethod
    def by_tls(cls, root: Path) -> Self:
        authority = Authority()
        router, engine = (TlsFolder(authority.issue(root / peer, peer)) for peer in (peers.ROUTER, peers.ENGINES))
        return cls(router=router, engine=engine)

    def server(self, script: Script) -> AbstractAsyncContextManager[RawServer]:
        return raw_server(script, None if self.engine is None else self.engine.server_context())

    def pool(self, settings: UpstreamSettings | None = None) -> Pool:
        return Pool(settings, self.router)


async def settle(pool: Pool) -> None:
    """What the loop owes (reports of closed connections) is paid; then nothing is active."""
    async with asyncio.timeout(WAIT_S):
        while pool.n_active:  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0.001)
    pool.check_integrity()


async def call_once(pool: Pool, port: int, request: CallRequest = POST) -> Recorder:
    recorder = Recorder()
    pool.stream_call(Endpoint("127.0.0.1", port), request, recorder)
    return await recorder.wait()


async def answer_ok(peer: Peer) -> None:
    while True:
        await peer.read_message()
        await peer.send(OK)


def sending(*pieces: bytes) -> Callable[[Peer], Awaitable[None]]:
    async def script(peer: Peer) -> None:
        await peer.read_message()
        await peer.send(*pieces)

    return script
