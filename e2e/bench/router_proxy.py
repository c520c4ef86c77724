"""What the router's data path adds to a call, beside a plain aiohttp reverse proxy and no proxy at all; part of `bench-quick`.

Upstream, agent, router, aiohttp proxy and load generator are separate processes on loopback. The three ways are interleaved in many
short rounds, in an order that turns; figures are medians over rounds. Ours is the whole router: it parses, decides by live telemetry and
has leases installed and consumed by an agent over gRPC. Each connection serves many sessions in turn, as an agent fleet does, so a session
comes back after tens of milliseconds: its lease is really told, published and consumed. The aiohttp proxy parses the same body and
decides nothing, which favours it.

    python e2e/bench/router_proxy.py [QUICK=1]
"""

import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.web
import orjson
import uvloop

from aerostat_core.ids import NamespacedName
from aerostat_router.app import running_router
from aerostat_router.http.exchange import Exchange, Handler
from aerostat_router.http.server import HttpServer
from aerostat_router.http.settings import ListenSettings
from aerostat_router.http.upstream import Pool
from aerostat_router.settings import parse_settings
from aerostat_runtime.clock import SystemClock
from aerostat_testing.declared import instance_object, model_object, slo_object
from aerostat_testing.fake_agent import fake_agent, instance_state, model_state
from aerostat_testing.memory_cluster import MemoryCluster
from aerostat_testing.waiting import eventually

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "You are a careful agent. " * 20}, {"role": "user", "content": "What is next? " * 20}]
BODY = orjson.dumps({"model": "small", "stream": False, "messages": MESSAGES})  # about 1 KB
SESSIONS_PER_CONNECTION = 64
ANSWER = orjson.dumps(
    {
        "id": "cmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "token " * 120}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 200, "completion_tokens": 120, "prompt_tokens_details": {"cached_tokens": 192}},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    rounds: int
    n_single: int  # calls over one connection per round: latency
    n_connections: int
    n_loaded: int  # calls over all connections per round: throughput


FULL = Plan(rounds=45, n_single=400, n_connections=32, n_loaded=2_500)
QUICK = Plan(rounds=15, n_single=256, n_connections=32, n_loaded=1_500)


# The three servers. Each prints its port, serves until its standard input ends.


class _UpstreamHandler:
    def handle(self, exchange: Exchange) -> None:
        exchange.reply(200, ((b"content-type", b"application/json"),), ANSWER)


@asynccontextmanager
async def _our_server(handler: Handler) -> AsyncIterator[int]:
    pool = Pool()
    server = HttpServer(handler, pool)
    yield await server.start(ListenSettings())
    await server.drain(1)
    await pool.close()


def _serve_upstream() -> AbstractAsyncContextManager[int]:
    return _our_server(_UpstreamHandler())


@asynccontextmanager
async def _serve_agent(upstream_port: int) -> AsyncIterator[int]:
    """Says that the upstream is an engine with the model open, and keeps leases as an agent does."""
    async with fake_agent() as agent:
        agent.put(instance_state("a", model_state("small", port=upstream_port, max_running=10_000)))
        yield int(agent.address.rpartition(":")[2])


@asynccontextmanager
async def _serve_ours(agent_port: int) -> AsyncIterator[int]:
    """The router as it is, but for its objects, which are in memory."""
    instance = instance_object("a", ["small"], address=f"127.0.0.1:{agent_port}", lease_ttl="1s")
    cluster = MemoryCluster(model_object("small", slo="fast"), slo_object("fast"), instance)
    settings = parse_settings(["--cluster", "folder:unused", "--listen", "127.0.0.1:0"])
    async with running_router(settings, cluster, SystemClock()) as app:
        small = NamespacedName("default", "small")
        await eventually(lambda: any(c.engine.can_serve for c in app.fleet.candidates(small)), "the router knows the engine")
        yield app.http_port


@asynccontextmanager
async def _serve_aiohttp(upstream_port: int) -> AsyncIterator[int]:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def proxy(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        body = await request.read()
        orjson.loads(body)
        headers = {"content-type": "application/json", "authorization": "Bearer bench", "x-smg-routing-key": "5e55"}
        async with session.post(f"http://127.0.0.1:{upstream_port}{request.path}", data=body, headers=headers) as answer:
            response = aiohttp.web.StreamResponse(status=answer.status, headers={"x-aerostat-instance": "instance-0"})
            response.content_type = answer.content_type
            response.content_length = answer.content_length
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = aiohttp.web.Application()
    app.router.add_route("*", "/{tail:.*}", proxy)
    runner = aiohttp.web.AppRunner(app, access_log=None)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()
    await session.close()


async def _serve(role: str, *args: str) -> None:
    servers: dict[str, Callable[..., AbstractAsyncContextManager[int]]] = {
        "upstream": _serve_upstream,
        "agent": _serve_agent,
        "ours": _serve_ours,
        "aiohttp": _serve_aiohttp,
    }
    async with servers[role](*map(int, args)) as port:
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@asynccontextmanager
async def _process(role: str, *args: int) -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__)), "serve", role, *map(str, args), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            line = await process.stdout.readline()
        if not line.strip():
            raise RuntimeError(f"the bench's {role} server did not start; its error is above")
        yield int(line)
    finally:
        process.stdin.close()
        async with asyncio.timeout(10):
            await process.wait()


# The load generator: a protocol, since a client library would cost more than what is measured.


class _Client(asyncio.Protocol):
    """Sends a request, reads the answer by its length, sends the next of another session, until the shared budget is spent."""

    def __init__(self, number: int, budget: list[int], took: list[float], done: asyncio.Event) -> None:
        self._budget, self._took, self._done = budget, took, done
        head = b"POST %b HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nX-Session-Id: %d-%d\r\nContent-Length: %d\r\n\r\n"
        sessions = range(SESSIONS_PER_CONNECTION)
        self._requests = itertools.cycle([head % (PATH.encode(), number, i, len(BODY)) + BODY for i in sessions])
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        if self._budget[0] <= 0:
            self._transport.close()
            return
        self._budget[0] -= 1
        self._sent_at = time.perf_counter()
        self._transport.write(next(self._requests))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, separator, body = self._got.partition(b"\r\n\r\n")
        if not separator:
            return
        if b" 200 " not in head[:16]:
            raise RuntimeError(f"the bench got {head[:200]!r}")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        self._got = b""
        self._took.append(time.perf_counter() - self._sent_at)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._budget[0]:
            self._done.set()


async def _load(port: int, *, n_connections: int, n_calls: int) -> tuple[float, float]:
    """Returns the median seconds of a call and calls per second."""
    took: list[float] = []
    budget, done = [n_calls], asyncio.Event()
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    for i in range(n_connections):
        await loop.create_connection(partial(_Client, i, budget, took, done), "127.0.0.1", port)
    async with asyncio.timeout(120):
        await done.wait()
        while len(took) < n_calls:  # noqa: ASYNC110 - the last answers are under way, for less than a round
            await asyncio.sleep(0.001)
    return statistics.median(took), n_calls / (time.perf_counter() - begun)


async def measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Returns {"figures", "spread", "baseline"} as `conventions.md` has them: ratios of interleaved rounds, and the absolute values."""
    latency: dict[str, list[float]] = {"direct": [], "aiohttp": [], "ours": []}
    rps: dict[str, list[float]] = {"aiohttp": [], "ours": []}
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(_process("upstream"))
        agent = await stack.enter_async_context(_process("agent", upstream))
        ports = {
            "direct": upstream,
            "aiohttp": await stack.enter_async_context(_process("aiohttp", upstream)),
            "ours": await stack.enter_async_context(_process("ours", agent)),
        }
        for port in ports.values():
            await _load(port, n_connections=4, n_calls=400)
        for i in range(plan.rounds):
            turned = list(ports)[i % 3 :] + list(ports)[: i % 3]
            for name in turned:
                port = ports[name]
                latency[name].append((await _load(port, n_connections=1, n_calls=plan.n_single))[0])
                if name in rps:
                    rps[name].append((await _load(port, n_connections=plan.n_connections, n_calls=plan.n_loaded))[1])
            progress(f"router_proxy: round {i + 1} of {plan.rounds}")
    return _summarise(latency, rps)


def _summarise(latency: dict[str, list[float]], rps: dict[str, list[float]]) -> dict[str, Any]:
    added = [
        (ours - direct) / (theirs - direct)
        for ours, theirs, direct in zip(latency["ours"], latency["aiohttp"], latency["direct"], strict=True)
        if theirs > direct
    ]
    gain = [ours / theirs for ours, theirs in zip(rps["ours"], rps["aiohttp"], strict=True)]
    mid = {name: statistics.median(values) for name, values in latency.items()}
    return {
        "figures": {
            "router_vs_aiohttp_latency": (mid["ours"] - mid["direct"]) / (mid["aiohttp"] - mid["direct"]),
            "router_rps_vs_aiohttp": statistics.median(rps["ours"]) / statistics.median(rps["aiohttp"]),
        },
        "spread": {"router_vs_aiohttp_latency": [min(added), max(added)], "router_rps_vs_aiohttp": [min(gain), max(gain)]},
        "baseline": {
            **{f"{name}_p50_us": value * 1e6 for name, value in mid.items()},
            **{f"{name}_rps": statistics.median(values) for name, values in rps.items()},
        },
    }


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(_serve(*sys.argv[2:]))
        return
    plan = QUICK if os.environ.get("QUICK") == "1" else FULL

    def progress(line: str) -> None:
        sys.stderr.write(line + "\n")

    result = uvloop.run(measure(plan, progress))
    sys.stdout.write(json.dumps({"bench": "router_proxy", "runs": plan.rounds, **result}) + "\n")


if __name__ == "__main__":
    main()
