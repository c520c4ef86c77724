"""The router as a process: settings, signals, the exit code."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop

from aerostat_core.errors import SettingError
from aerostat_router.app import RouterApp
from aerostat_router.settings import Settings, parse_settings
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster import open_cluster
from aerostat_runtime.logs import set_up_logs
from aerostat_runtime.process import die_with_parent

logger = logging.getLogger("aerostat_router")

EXIT_BAD_SETTING = 2
EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv)
        set_up_logs(settings.log_level.upper())
        if settings.die_with_parent is not None:
            die_with_parent(settings.die_with_parent)
        return uvloop.run(_run(settings))
    except SettingError as error:
        sys.stderr.write(f"aerostat_router: {error.message}\n")
        return EXIT_BAD_SETTING


async def _run(settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    cluster = open_cluster(settings.cluster)
    try:
        app = RouterApp(settings, cluster, SystemClock())
    except SettingError:
        await cluster.close()
        raise
    try:
        await app.start()
        # What start-up made lives as long as the process; a collector that skips it pauses streams for less long.
        gc.freeze()
        logger.info("router %s: http %d, grpc %d, admin %d", settings.name, app.http_port, app.grpc_port, app.admin_port)
        waits = [loop.create_task(stopping.wait()), loop.create_task(app.failed.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if stopping.is_set():
            logger.info("draining for at most %g s", settings.drain)
    finally:
        n_cut = await app.stop(settings.drain if stopping.is_set() else 0)
        await cluster.close()
    if n_cut:
        logger.warning("%d connections were cut at the end of the drain", n_cut)
    return EXIT_FAILED if app.failed.is_set() else 0
