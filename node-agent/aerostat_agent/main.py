"""The agent as a process: its settings, its signals, its end. SIGTERM leaves engines alone, as an upgrade of the agent must."""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Final

from aerostat_agent.agent import serve
from aerostat_agent.keeper_client import KeeperLink
from aerostat_agent.settings import Settings, parse_settings
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Seconds
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster import open_cluster
from aerostat_runtime.process import die_with_parent

_log = logging.getLogger(__name__)

_KEEPER_LIMIT: Final[Seconds] = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s agent: %(message)s")
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it tells each file event
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
    clock = SystemClock()
    cluster = open_cluster(settings.cluster)
    try:
        while not stop.is_set():
            link = await KeeperLink.attach(settings.keeper_socket, deadline=_KEEPER_LIMIT)
            try:
                await serve(settings, cluster, link, clock, stop)
            except TemporaryError as error:
                _log.warning("%s; attaching again", error.message)
                await asyncio.sleep(error.retry_after)
            finally:
                await link.close()
    finally:
        await cluster.close()
