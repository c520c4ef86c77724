"""One router, put together: what it watches, what it listens on, and how it ends. `main` runs it as a process, tests in theirs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from aerostat.v1 import telemetry_pb2 as pb
from aerostat_core.addresses import Address
from aerostat_core.clock import Clock
from aerostat_core.defaults import HEARTBEAT
from aerostat_core.errors import SettingError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_router.admin import Admin, why_not_ready
from aerostat_router.background import Background
from aerostat_router.catalog import WATCHED, Catalog
from aerostat_router.dispatch import Dispatcher
from aerostat_router.fleet import Fleet
from aerostat_router.grpc_call import GrpcCalls
from aerostat_router.grpc_server import GrpcServer, InferenceServicer
from aerostat_router.http.answer import UpstreamError, open_answer
from aerostat_router.http.server import HttpServer
from aerostat_router.http.settings import FrontSettings, ListenSettings
from aerostat_router.http.stream_call import CallRequest, Endpoint
from aerostat_router.http.upstream import Pool
from aerostat_router.intake import Intake
from aerostat_router.metrics import FleetCollector, Metrics
from aerostat_router.openai_http import ApiHandler
from aerostat_router.settings import Settings
from aerostat_router.telemetry_client import AgentLink, Agents, AgentUnreachableError
from aerostat_router.wire import demand_request
from aerostat_runtime.cluster.port import Cluster, Kind
from aerostat_runtime.tls import TlsFolder

logger = logging.getLogger(__name__)

REPORT_EVERY: Final[Seconds] = 1.0
HEALTH_TIMEOUT: Final[Seconds] = 1.0


class RouterApp:
    """Made inside the loop that runs it. `start`, then `stop`; in between `failed` is set when a part ends that must not."""

    def __init__(self, settings: Settings, cluster: Cluster, clock: Clock) -> None:
        """Raises SettingError for a TLS folder that cannot work."""
        self._settings = settings
        self._tls = None if settings.tls_dir is None else TlsFolder(settings.tls_dir)
        self._cluster = cluster
        self._clock = clock
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self.metrics = Metrics()
        self.catalog = Catalog(self._on_declared)
        self.fleet = Fleet(self._on_telemetry)
        self._background = Background()
        self.agents = Agents(self._make_link, self.fleet.drop)
        self.pool = Pool(tls=self._tls)
        self.dispatcher = Dispatcher(
            router=settings.name,
            clock=clock,
            catalog=self.catalog,
            fleet=self.fleet,
            link=self.agents.link,
            is_healthy=self._is_healthy,
            metrics=self.metrics,
            background=self._background,
        )
        intake = Intake(self.catalog, self.dispatcher)
        handler = ApiHandler(router=settings.name, catalog=self.catalog, dispatcher=self.dispatcher, intake=intake)
        self.http = HttpServer(handler, self.pool, FrontSettings(max_body_bytes=settings.max_body_bytes))
        calls = GrpcCalls(router=settings.name, dispatcher=self.dispatcher, intake=intake, caller=self.pool, clock=clock)
        self.grpc = GrpcServer(InferenceServicer(calls, self.catalog))
        self._admin: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.http_port = self.grpc_port = self.admin_port = 0

    async def start(self) -> None:
        """Listens at once, so that a busy port is known at once; calls are answered 503 until the declared models are read.

        Raises SettingError. What was started by then is `stop`'s to end.
        """
        self.admin_port = await self._start_admin(self._settings.admin_listen)
        self.grpc_port = await self.grpc.start(self._settings.grpc_listen)
        self.http_port = await self.http.start(ListenSettings(address=self._settings.listen))
        for kind in WATCHED:
            self._run(self._watch(kind), f"watch {kind.value}")
        self._run(self._report_demand(), "report demand")
        self._run(self._publish_readiness(), "readiness")

    async def stop(self, grace: Seconds) -> int:
        """Refuses new calls, lets streams finish for `grace` seconds, then cuts them. Returns how many HTTP connections were cut."""
        self.dispatcher.drain()
        n_cut, _ = await asyncio.gather(self.http.drain(grace), self.grpc.drain(grace))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._background.close()
        await self.agents.close()
        await self.pool.close()
        if self._admin is not None:
            await self._admin.cleanup()
        return n_cut

    # What the world says.

    def _on_declared(self) -> None:
        self.agents.reconcile(self.catalog.addresses())
        self.dispatcher.estimates.keep_only({model.name for model in self.catalog.models()})
        self.dispatcher.pump_all()

    def _on_telemetry(self, models: Collection[NamespacedName]) -> None:
        self.dispatcher.pump(models)

    def _make_link(self, address: str) -> AgentLink:
        return AgentLink(address, router=self._settings.name, apply=self.fleet.apply, clock=self._clock, tls=self._tls)

    async def _is_healthy(self, endpoint: Endpoint, call_key: str) -> bool:
        request = CallRequest(b"GET", b"/health", ((b"authorization", b"Bearer " + call_key.encode()),))
        try:
            async with open_answer(self.pool, endpoint, request, head_timeout_s=HEALTH_TIMEOUT) as answer:
                return answer.status == 200
        except UpstreamError:
            return False

    # Tasks that live as long as the router.

    def _run(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.failure = task.exception()
            logger.critical("the task %s of this router ended", task.get_name(), exc_info=self.failure)
            self.failed.set()

    async def _watch(self, kind: Kind) -> None:
        async for event in self._cluster.watch(kind):
            self.catalog.apply(event)

    async def _report_demand(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY)
            demand = self.dispatcher.demand
            request = demand_request(self._settings.name, demand.window, demand.report(self._clock.monotonic()))
            await asyncio.gather(*(self._report_to(link, request) for link in self.agents.links() if link.is_connected))

    async def _report_to(self, link: AgentLink, request: pb.ReportDemandRequest) -> None:
        try:
            await link.report_demand(request)
        except AgentUnreachableError as error:
            logger.debug("demand not reported: %s", error.message)

    async def _publish_readiness(self) -> None:
        was_ready = False
        while True:
            is_ready = why_not_ready(self.catalog, self.fleet, is_draining=self.dispatcher.is_draining) is None
            if is_ready != was_ready:
                await self.grpc.set_ready(is_ready=is_ready)
                was_ready = is_ready
            await asyncio.sleep(HEARTBEAT)

    async def _start_admin(self, listen: Address) -> int:
        admin = Admin(
            router=self._settings.name,
            catalog=self.catalog,
            fleet=self.fleet,
            dispatcher=self.dispatcher,
            metrics=self.metrics,
            clock=self._clock,
            is_alive=lambda: not self.failed.is_set(),
        )
        self.metrics.registry.register(FleetCollector(self.fleet, self._clock.monotonic))
        self._admin = web.AppRunner(admin.app(), access_log=None, shutdown_timeout=1)
        await self._admin.setup()
        site = web.TCPSite(self._admin, listen.host, listen.port)
        try:
            await site.start()
        except OSError as refused:
            raise SettingError(f"cannot listen on {listen} ({refused.strerror}). Choose another {listen.flag}.") from refused
        return int(self._admin.addresses[0][1])


@asynccontextmanager
async def running_router(settings: Settings, cluster: Cluster, clock: Clock) -> AsyncIterator[RouterApp]:
    """A started router that ends with the block, its streams cut."""
    app = RouterApp(settings, cluster, clock)
    try:
        await app.start()
        yield app
    finally:
        await app.stop(0)
