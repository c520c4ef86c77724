"""The keeper as a process: its arguments, its signals, its end.

SIGTERM or SIGINT, or the end of the parent it was told to die with: every process it started gets SIGTERM, SIGKILL after the
grace, is reaped, and the socket is removed.
"""

import argparse
import asyncio
import ipaddress
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aerostat_agent.keeper.processes import ProcessTable
from aerostat_agent.keeper.server import KeeperServer
from aerostat_agent.ports import free_port
from aerostat_agent.site import EngineSite
from aerostat_agent.unix_socket import listen
from aerostat_core.errors import SettingError
from aerostat_core.ids import Seconds
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.logs import set_up_logs
from aerostat_runtime.process import adopt_orphans, die_with_parent
from aerostat_runtime.tls import TlsFolder

_log = logging.getLogger(__name__)

_POLL: Final[Seconds] = 0.05  # while a session without its first process ends, and at the keeper's own end
_BOUND_LOGS_EVERY: Final[Seconds] = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSettings:
    socket: Path
    grace: Seconds  # between SIGTERM and SIGKILL at the keeper's end
    parent_pid: int | None
    site: EngineSite


def parse_settings(argv: Sequence[str] | None) -> KeeperSettings:
    parser = argparse.ArgumentParser(prog="python -m aerostat_agent.keeper", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="the Unix socket to serve")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS", help="from SIGTERM to SIGKILL at the end (default 10)")
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help="end when this parent process ends")
    parser.add_argument("--engine-host", default="127.0.0.1", metavar="ADDRESS", help="where engines listen, an IP address of this pod")
    parser.add_argument("--tls-dir", type=Path, metavar="DIR", help="engines serve HTTPS with this folder's tls.crt, tls.key and ca.crt")
    args = parser.parse_args(argv)
    if args.grace < 0:
        raise SettingError(f"--grace must be 0 or more seconds, got {args.grace}")
    tls_dir = None if args.tls_dir is None else str(args.tls_dir.absolute())
    site = EngineSite(host=_address(args.engine_host), tls_dir=tls_dir)
    return KeeperSettings(socket=args.socket, grace=args.grace, parent_pid=args.die_with_parent, site=site)


def _address(text: str) -> str:
    """Without brackets. Raises SettingError for what routers could not call."""
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError as error:
        raise SettingError(f"--engine-host must be an IP address, got {text!r}") from error
    if address.is_unspecified:
        raise SettingError(f"--engine-host {text} is no address to call: routers are told it, so set the one of this pod")
    return str(address)


def check(site: EngineSite) -> None:
    """Each engine finds out for itself what is wrong with its site; here it is told once. Raises SettingError."""
    try:
        free_port(site.host)
    except OSError as error:
        raise SettingError(f"--engine-host {site.host}: nothing can listen there ({error.strerror}); set an address of this pod") from error
    if site.tls_dir is not None:
        TlsFolder(Path(site.tls_dir))


def main(argv: Sequence[str] | None = None) -> int:
    set_up_logs()
    try:
        settings = parse_settings(argv)
        if settings.parent_pid is not None:
            die_with_parent(settings.parent_pid)
        adopt_orphans()
        asyncio.run(run(settings))
    except SettingError as error:
        _log.error("%s", error.message)
        return 2
    return 0


async def run(settings: KeeperSettings) -> None:
    """Serve until told to end. Raises SettingError."""
    check(settings.site)
    loop = asyncio.get_running_loop()
    table, stop, child_ended = ProcessTable(), asyncio.Event(), asyncio.Event()
    listener = listen(settings.socket)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    loop.add_signal_handler(signal.SIGCHLD, child_ended.set)
    server = KeeperServer(table, SystemClock(), settings.site)
    _log.info("serving %s; engines listen on %s", settings.socket, settings.site.host)
    try:
        tasks = [
            asyncio.create_task(stop.wait(), name="stop"),
            asyncio.create_task(server.serve(listener.sock), name="serve"),
            asyncio.create_task(_reap(table, server, child_ended), name="reap"),
            asyncio.create_task(_bound_logs(table), name="logs"),
        ]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    finally:
        await _end_all(table, settings.grace)
        listener.close()
    for task in done:
        task.result()  # a task that failed is loud


async def _reap(table: ProcessTable, server: KeeperServer, child_ended: asyncio.Event) -> None:
    while True:
        child_ended.clear()
        for process in table.reap():
            await server.report(process)
        if table.has_lingering:
            await asyncio.sleep(_POLL)
        else:
            await child_ended.wait()


async def _bound_logs(table: ProcessTable) -> None:
    while True:
        await asyncio.sleep(_BOUND_LOGS_EVERY)
        try:
            table.bound_logs()
        except OSError as error:
            _log.warning("cannot bound a log file: %s", error)


async def _end_all(table: ProcessTable, grace: Seconds) -> None:
    """Returns when no process of ours lives, orphans that were adopted included."""
    loop = asyncio.get_running_loop()
    kill_at = loop.time() + grace
    n = table.signal_all(signal.SIGTERM)
    _log.info("ending; %d processes got SIGTERM", n)
    while table.has_children:
        await asyncio.sleep(_POLL)
        table.reap()
        if loop.time() >= kill_at:
            table.signal_all(signal.SIGKILL)
    _log.info("ended")
