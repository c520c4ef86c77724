"""Metrics and health over HTTP, for people and probes; no way to change anything."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry

from aerostat_core.addresses import Address
from aerostat_core.errors import SettingError


@asynccontextmanager
async def serving(
    listen: Address, registry: CollectorRegistry, is_ready: Callable[[], bool], *, why_not: str = "the Instances are not known yet"
) -> AsyncIterator[Address]:
    """Serves while entered; the address has the real port. Raises SettingError when it cannot listen there."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ready\n") if is_ready() else web.Response(status=503, text=f"{why_not}\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host, listen.port)
        try:
            await site.start()
        except OSError as error:
            raise SettingError(f"cannot listen on {listen}: {error}; set {listen.flag} to a free address") from error
        yield replace(listen, port=runner.addresses[0][1])
    finally:
        await runner.cleanup()
