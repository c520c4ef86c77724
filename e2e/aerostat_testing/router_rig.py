"""Whole routers over real sockets: a fake agent's telemetry, scripted engines behind the real data path, plain HTTP clients."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from aerostat_core.ids import NamespacedName
from aerostat_core.prefix_hash import session_key
from aerostat_router.app import RouterApp, running_router
from aerostat_router.settings import parse_settings
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.declared import instance_object, model_object, slo_object
from aerostat_testing.fake_agent import FakeAgent, fake_agent, instance_state, model_state
from aerostat_testing.memory_cluster import MemoryCluster
from aerostat_testing.scripted_engine import ScriptedEngine, scripted_engine
from aerostat_testing.waiting import eventually

SMALL = NamespacedName("default", "small")
CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
KEY = session_key(tenant="default", session_id="s")


@dataclass(frozen=True, kw_only=True)
class TlsFolders:
    """One for each engine."""

    router: Path
    agent: Path
    engines: tuple[Path, ...]


@dataclass
class Rig:
    apps: list[RouterApp]
    agent: FakeAgent
    engines: list[ScriptedEngine]  # of the instances a, b, ...
    cluster: MemoryCluster
    clients: list[httpx.AsyncClient]  # one per router

    @property
    def app(self) -> RouterApp:
        return self.apps[0]

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    async def chat(
        self, *, session: str | None = None, router: int = 0, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        ours = {} if session is None else {"x-aerostat-session-id": session}
        return await self.clients[router].post("/v1/chat/completions", json=CHAT | body, headers=ours | (headers or {}))

    async def open_everywhere(self, **figures: Any) -> None:
        """All instances have the model open, and every router knows."""
        for name, engine in zip("ab", self.engines, strict=False):
            self.agent.put(instance_state(name, model_state("small", port=engine.port, **figures)))
        await self.known(lambda app: all(c.engine.can_serve for c in app.fleet.candidates(SMALL)))

    async def known(self, what: Any) -> None:
        for app in self.apps:
            await eventually(lambda app=app: what(app), "the router knows")  # type: ignore[misc]

    async def settle(self) -> None:
        for app in self.apps:
            await eventually(lambda app=app: app.dispatcher.n_active == 0, "no call left")  # type: ignore[misc]
            app.dispatcher.check_integrity()


@asynccontextmanager
async def rig(
    *,
    n_engines: int = 1,
    n_routers: int = 1,
    hold_budget: str = "5s",
    lease_ttl: str = "5s",
    tls: TlsFolders | None = None,
    **spec: Any,
) -> AsyncIterator[Rig]:
    """Routers, instances `a` (and `b`) on one agent with the model open, and a client per router. `tls`: the folder of each part."""
    async with AsyncExitStack() as stack:
        agent = await stack.enter_async_context(fake_agent(TlsFolder(tls.agent) if tls else None))
        of_engines = [TlsFolder(folder).server_context() for folder in tls.engines] if tls else [None] * n_engines
        engines = [await stack.enter_async_context(scripted_engine(of_engine)) for of_engine in of_engines]
        instances = [instance_object(name, ["small"], address=agent.address, lease_ttl=lease_ttl) for name in "ab"[:n_engines]]
        cluster = MemoryCluster(model_object("small", slo="fast", **spec), slo_object("fast", hold_budget=hold_budget), *instances)
        for name, engine in zip("ab", engines, strict=False):
            agent.put(instance_state(name, model_state("small", port=engine.port)))
        apps, clients = [], []
        for i in range(n_routers):
            flags = ["--cluster", "folder:unused", "--listen", "127.0.0.1:0", "--name", f"r{i}"]
            settings = parse_settings([*flags, "--tls-dir", str(tls.router)] if tls else flags)
            app = await stack.enter_async_context(running_router(settings, cluster, SystemClock()))
            apps.append(app)
            url = f"http://127.0.0.1:{app.http_port}"
            clients.append(await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=10)))
        r = Rig(apps, agent, engines, cluster, clients)
        await r.known(lambda app: len(app.fleet.candidates(SMALL)) == n_engines)
        yield r
        await r.settle()
