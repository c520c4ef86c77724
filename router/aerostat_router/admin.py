"""The operators' side: health, metrics, and what this router knows, as JSON. Session keys are hashes; call keys are never shown."""

from collections.abc import Callable
from typing import Final

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from aerostat_core.clock import Clock
from aerostat_router.catalog import Catalog
from aerostat_router.dispatch import Dispatcher
from aerostat_router.fleet import Fleet
from aerostat_router.metrics import Metrics
from aerostat_router.policy.views import EngineView, LeaseView, SessionView

MAX_SESSIONS: Final = 10_000


def why_not_ready(catalog: Catalog, fleet: Fleet, *, is_draining: bool) -> str | None:
    """None: calls may come, also those to nodes that just begin, which are held or answered with a reason.

    A router that hears none of the agents that there are is of no use: until it does, others serve.
    """
    if is_draining:
        return "draining"
    if not catalog.is_synced:
        return "the declared objects have not been read yet"
    if catalog.addresses() and not any(True for _ in fleet.agents()):
        return "no node agent has been heard yet"
    return None


class Admin:
    def __init__(
        self,
        *,
        router: str,
        catalog: Catalog,
        fleet: Fleet,
        dispatcher: Dispatcher,
        metrics: Metrics,
        clock: Clock,
        is_alive: Callable[[], bool],
    ) -> None:
        self._router = router
        self._catalog = catalog
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._is_alive = is_alive

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics_page),
                web.get("/admin/v1/sessions", self._sessions),
                web.get("/admin/v1/fleet", self._fleet_page),
            ]
        )
        return app

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n") if self._is_alive() else web.Response(status=503, text="a part of this router has ended\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        why = why_not_ready(self._catalog, self._fleet, is_draining=self._dispatcher.is_draining)
        return web.Response(text="ok\n") if why is None else web.Response(status=503, text=f"{why}\n")

    async def _metrics_page(self, request: web.Request) -> web.Response:
        self._metrics.in_flight.set(self._dispatcher.n_active)
        return web.Response(body=generate_latest(self._metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _sessions(self, request: web.Request) -> web.Response:
        """Query `model` (an object's name) narrows it; the most recent first."""
        wanted = request.query.get("model")
        now = self._clock.monotonic()
        self._fleet.leases.sweep(now)
        found = [s for s in self._fleet.sessions() if wanted is None or s.model.name == wanted]
        found.sort(key=lambda s: (-s.finished_at, s.session, s.instance))
        shown = [self._session(s, now) for s in found[:MAX_SESSIONS]]
        return _json({"sessions": shown, "total": len(found)})

    def _session(self, s: SessionView, now: float) -> dict[str, object]:
        lease = self._fleet.leases.find(s.session, s.model, now)
        lease = lease if lease is not None and lease.instance == s.instance else None
        return {
            "session": s.session,
            "namespace": s.model.namespace,
            "model": s.model.name,
            "instance": s.instance.name,
            "tier": s.tier.name.lower(),
            "tokens": s.n_tokens,
            "turns": s.turns,
            "suspended": s.is_suspended,
            "lastFinishedAt": s.finished_at,
            "lease": _lease(lease, now),
        }

    async def _fleet_page(self, request: web.Request) -> web.Response:
        now = self._clock.monotonic()
        return _json(
            {
                "router": self._router,
                "inFlight": self._dispatcher.n_active,
                "held": self._dispatcher.n_held,
                "agents": [
                    {"address": source.address, "epoch": epoch, "version": version, "ageSeconds": round(now - source.heard_at, 3)}
                    for source, epoch, version in self._fleet.agents()
                ],
                "instances": [
                    {
                        "namespace": instance.name.namespace,
                        "name": instance.name.name,
                        "pool": instance.pool,
                        "node": instance.node,
                        "sharing": instance.sharing,
                        "draining": instance.is_draining,
                        "agent": source.address,
                        "models": [self._engine(engine) for engine in instance.engines],
                    }
                    for instance, source in sorted(self._fleet.instances(), key=lambda pair: pair[0].name)
                ],
            }
        )

    def _engine(self, engine: EngineView) -> dict[str, object]:
        place = (engine.instance, engine.model)
        return {
            "model": engine.model.name,
            "state": engine.state.value,
            "waking": engine.is_waking,
            "epoch": engine.epoch,
            "endpoint": f"{engine.host}:{engine.port}" if engine.port else "",
            "running": engine.running,
            "waiting": engine.waiting,
            "maxRunning": engine.max_running,
            "queueSeconds": engine.queue_seconds,
            "openSeconds": engine.open_seconds,
            "kvCapacityTokens": engine.kv_capacity_tokens,
            "kvFreeTokens": engine.kv_free_tokens,
            "leases": self._fleet.leases.units(place),
            "inFlightHere": self._fleet.n_in_flight(place),
            "reason": engine.reason,
            "message": engine.message,
        }


def _lease(lease: LeaseView | None, now: float) -> dict[str, object] | None:
    return None if lease is None else {"id": lease.id, "expiresInSeconds": round(lease.expires_at - now, 3)}


def _json(document: object) -> web.Response:
    return web.Response(body=orjson.dumps(document), content_type="application/json")
