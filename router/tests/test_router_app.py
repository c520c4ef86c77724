"""The whole router over real sockets: a fake agent's telemetry, a scripted engine behind the real data path, real clients."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from aerostat_core.ids import NamespacedName
from aerostat_router.app import RouterApp, running_router
from aerostat_router.settings import parse_settings
from aerostat_runtime.clock import SystemClock
from aerostat_testing.declared import instance_object, model_object, slo_object
from aerostat_testing.fake_agent import FakeAgent, fake_agent, instance_state, model_state
from aerostat_testing.memory_cluster import MemoryCluster
from aerostat_testing.scripted_engine import ScriptedEngine, scripted_engine

pytestmark = pytest.mark.cpu

SMALL = NamespacedName("default", "small")
SETTINGS = parse_settings(["--cluster", "folder:unused", "--listen", "127.0.0.1:0", "--name", "r1"])
CHAT = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class Rig:
    app: RouterApp
    agent: FakeAgent
    engine: ScriptedEngine
    cluster: MemoryCluster
    client: httpx.AsyncClient

    async def chat(self, *, session: str | None = None, **body: Any) -> httpx.Response:
        headers = {} if session is None else {"x-aerostat-session-id": session}
        return await self.client.post("/v1/chat/completions", json=CHAT | body, headers=headers)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not what():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def rig(**spec: Any) -> AsyncIterator[Rig]:
    async with fake_agent() as agent, scripted_engine() as engine:
        agent.put(instance_state("a", model_state("small", port=engine.port)))
        cluster = MemoryCluster(
            model_object("small", slo="fast", **spec), slo_object("fast"), instance_object("a", ["small"], address=agent.address)
        )
        async with (
            running_router(SETTINGS, cluster, SystemClock()) as app,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.http_port}", timeout=10) as client,
        ):
            await until(lambda: bool(app.fleet.candidates(SMALL)))
            yield Rig(app, agent, engine, cluster, client)
            await until(lambda: app.dispatcher.n_active == 0)
            app.dispatcher.check_integrity()


async def test_a_call_is_answered_and_says_where() -> None:
    async with rig() as r:
        answer = await r.chat(session="s")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-aerostat-instance"] == "a"
        assert answer.headers["x-aerostat-route"] == "residency"
        again = await r.chat(session="s")
        assert again.headers["x-aerostat-route"] == "lease"
