"""Health and metrics over HTTP, for probes and people; no way to change anything."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry

from aerostat_core.addresses import Address
from aerostat_core.errors import SettingError

Why = Callable[[], str | None]  # None: all is well


@asynccontextmanager
async def serving(listen: Address, metrics: Callable[[], CollectorRegistry], why_sick: Why, why_not_ready: Why) -> AsyncIterator[int]:
    """Serves while entered; gives the real port. Raises SettingError when it cannot listen there."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics()), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        return _answer(why_sick())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(why_not_ready())

    app = web.Application()
    app.add_routes([web.get("/metrics", page), web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host, listen.port)
        try:
            await site.start()
        except OSError as error:
            raise SettingError(f"cannot listen on {listen}: {error}; set {listen.flag} to a free address") from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _answer(why: str | None) -> web.Response:
    return web.Response(text="ok\n") if why is None else web.Response(status=503, text=f"{why}\n")
