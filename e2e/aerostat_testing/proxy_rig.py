"""Front, pool and a raw upstream over real sockets, with a handler that forwards everything."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aerostat_core.api_errors import ApiError, no_capacity, upstream_disconnected
from aerostat_router.http.exchange import Exchange, Forwarded
from aerostat_router.http.server import HttpServer
from aerostat_router.http.settings import FrontSettings, ListenSettings
from aerostat_router.http.stream_call import CallRequest, Endpoint, Failure
from aerostat_router.http.upstream import Pool
from aerostat_testing.raw_http import WAIT_S, Peer, RawServer, raw_server

POST = b"POST /v1/x?q=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def sized(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass
class Proxy:
    """Forwards everything to one endpoint and remembers how each forward ended."""

    endpoint: Endpoint
    ends: list[Forwarded] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def handle(self, exchange: Exchange) -> None:
        request = exchange.request
        call = CallRequest(request.method, request.path + b"?" + request.query, ((b"x-peer", exchange.peer.encode()),), request.body)
        exchange.forward(self.endpoint, call, self, reply_headers=((b"x-request-id", request.headers.get(b"x-request-id", b"none")),))

    def on_first_byte(self, exchange: Exchange) -> None:
        pass

    def on_end(self, exchange: Exchange, forwarded: Forwarded) -> None:
        self.ends.append(forwarded)
        self.ended.set()
        if exchange.is_open:
            exchange.reply_error(no_capacity("m", "the upstream failed", retry_after=1))

    def explain(self, failure: Failure) -> ApiError:
        return upstream_disconnected("m")

    async def wait(self) -> Forwarded:
        async with asyncio.timeout(WAIT_S):
            await self.ended.wait()
        self.ended.clear()
        return self.ends[-1]


@dataclass
class Rig:
    upstream: RawServer
    proxy: Proxy
    pool: Pool
    server: HttpServer
    port: int

    async def settle(self) -> None:
        """Every count returns to zero, but for idle upstream connections."""
        async with asyncio.timeout(WAIT_S):
            while self.server.n_connections or self.server.n_in_flight or self.pool.n_active:  # noqa: ASYNC110 - counts have no event
                await asyncio.sleep(0.001)
        self.server.check_integrity()
        self.pool.check_integrity()


@asynccontextmanager
async def rig(script: Callable[[Peer], Awaitable[None]], front: FrontSettings | None = None) -> AsyncIterator[Rig]:
    async with raw_server(script) as upstream:
        pool = Pool()
        proxy = Proxy(Endpoint("127.0.0.1", upstream.port))
        server = HttpServer(proxy, pool, front)
        built = Rig(upstream, proxy, pool, server, await server.start(ListenSettings()))
        try:
            yield built
            await built.settle()
        finally:
            await server.drain(0.1)
            await pool.close()


async def echo(peer: Peer) -> None:
    while True:
        request = await peer.read_message()
        await peer.send(sized(json.dumps([request.start, request.headers.get("x-peer"), request.body.decode("latin-1")]).encode()))
