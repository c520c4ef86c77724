"""The agent as a process: its settings, its signals, its end. SIGTERM leaves engines alone, as an upgrade of the agent must."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from prometheus_client import CollectorRegistry

from aerostat_agent import admin
from aerostat_agent.agent import serve
from aerostat_agent.keeper_client import KeeperLink
from aerostat_agent.settings import Settings, parse_settings
from aerostat_core.clock import Clock
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Seconds
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster import open_cluster
from aerostat_runtime.cluster.port import Adapter
from aerostat_runtime.logs import set_up_logs
from aerostat_runtime.process import die_with_parent
from aerostat_runtime.tls import TlsFolder

_log = logging.getLogger(__name__)

_SOON: Final[Seconds] = 1.0  # a keeper that is there answers before


def main(argv: Sequence[str] | None = None) -> int:
    set_up_logs()
    try:
        settings = parse_settings(argv)
        if settings.parent_pid is not None:
            die_with_parent(settings.parent_pid)
        asyncio.run(run(settings))
    except PermanentError as error:
        _log.error("%s: %s", error.reason, error.message)
        return 2
    return 0


async def run(settings: Settings) -> None:
    """Attach to the keeper and serve, again after each loss of it, until told to stop. Raises PermanentError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    settings.log_dir.mkdir(mode=0o700, exist_ok=True)
    tls = None if settings.tls_dir is None else TlsFolder(settings.tls_dir)
    clock = SystemClock()
    cluster = open_cluster(settings.cluster)
    try:
        while not stop.is_set():
            try:
                await _serve_keeper(settings, tls, cluster, clock, stop)
            except TemporaryError as error:
                _log.warning("%s; attaching again", error.message)
                await asyncio.sleep(error.retry_after)
    finally:
        await cluster.close()


async def _serve_keeper(settings: Settings, tls: TlsFolder | None, cluster: Adapter, clock: Clock, stop: asyncio.Event) -> None:
    """Raises TemporaryError when the keeper is lost."""
    if (link := await _attach(settings, stop)) is not None:
        try:
            await serve(settings, tls, cluster, cluster, link, clock, stop)
        finally:
            await link.close()


async def _attach(settings: Settings, stop: asyncio.Event) -> KeeperLink | None:
    """None: told to stop while no keeper answered. Raises PermanentError, or TemporaryError when it is lost at once.

    Probes are answered meanwhile: this process is well, and a restart brings no keeper.
    """
    attaching = asyncio.create_task(KeeperLink.attach(settings.keeper_socket, deadline=settings.keeper_limit))
    stopping = asyncio.create_task(stop.wait())
    waits = {attaching, stopping}
    try:
        done, _ = await asyncio.wait(waits, timeout=_SOON, return_when=asyncio.FIRST_COMPLETED)
        async with AsyncExitStack() as meanwhile:
            if not done:
                why = f"no keeper answers on {settings.keeper_socket}: the engines' pod of this node does not run"
                _log.warning("%s; waiting for it", why)
                await meanwhile.enter_async_context(admin.serving(settings.admin_listen, CollectorRegistry(), lambda: False, why_not=why))
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return attaching.result() if attaching.done() else None
    finally:
        attaching.cancel()
        stopping.cancel()
        await asyncio.gather(attaching, stopping, return_exceptions=True)
