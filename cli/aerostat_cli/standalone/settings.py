"""Settings of `aerostat up`, built once from its arguments, and the command lines of its children."""

import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aerostat_cli.standalone.children import ChildSpec
from aerostat_cli.standalone.run_state import RouterAddresses
from aerostat_core.errors import SettingError
from aerostat_core.ids import Seconds

HOST: Final = "127.0.0.1"
NODE: Final = "local"
DRAIN: Final[Seconds] = 15.0  # for streams that are under way at the end
MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    manifests: Path
    state: Path
    model_cache: Path
    model_cache_limit: str  # empty: none
    routers: tuple[RouterAddresses, ...]

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def cluster(self) -> str:
        return f"folder:{self.state}"


def router_addresses(n_routers: int, *, http: int, grpc: int, admin: int) -> tuple[RouterAddresses, ...]:
    """Router i listens on each first port + i; port 0 asks the kernel. Raises SettingError that names the flag."""
    listeners = {"--port": http, "--grpc-port": grpc, "--admin-port": admin}
    taken: set[int] = set()
    addresses = []
    for i in range(n_routers):
        ports = [_available_port(flag, first + i if first else 0, taken) for flag, first in listeners.items()]
        addresses.append(RouterAddresses(**dict(zip(("http", "grpc", "admin"), (f"{HOST}:{p}" for p in ports), strict=True))))
    return tuple(addresses)


def _available_port(flag: str, port: int, taken: set[int]) -> int:
    if not 0 <= port <= MAX_PORT:
        raise SettingError(f"{flag}: {port} is no port (0 to {MAX_PORT})")
    if port in taken:
        raise SettingError(f"{flag}: port {port} is wanted twice; leave room for all routers between the first ports")
    with socket.socket() as probe:
        # As a server does: connections of an earlier run that linger do not make a port busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen()
        except OSError as error:
            raise SettingError(f"port {port} is not to be had ({error.strerror}): choose another one with {flag}") from error
        chosen: int = probe.getsockname()[1]
    if chosen in taken:  # the kernel gave out again what a router will take
        return _available_port(flag, port, taken)
    taken.add(chosen)
    return chosen


def keeper_spec(settings: UpSettings, run_folder: Path, parent_pid: int) -> ChildSpec:
    argv: tuple[str, ...] = (
        "-m",
        "aerostat_agent.keeper",
        "--socket",
        str(run_folder / "keeper.sock"),
        "--die-with-parent",
        str(parent_pid),
    )
    return ChildSpec(
        name="keeper",
        argv=(sys.executable, *argv),
        log=settings.logs / "keeper.log",
        stop_grace=15.0,
        what_it_means="its engines are gone and start again",
    )


def agent_spec(settings: UpSettings, run_folder: Path, parent_pid: int) -> ChildSpec:
    argv: tuple[str, ...] = ("-m", "aerostat_agent", "--node", NODE, "--cluster", settings.cluster, "--run-dir", str(run_folder))
    argv += ("--model-cache", str(settings.model_cache), "--telemetry-listen", f"{HOST}:0", "--die-with-parent", str(parent_pid))
    argv += ("--model-cache-limit", settings.model_cache_limit) if settings.model_cache_limit else ()
    return ChildSpec(
        name="agent",
        argv=(sys.executable, *argv),
        log=settings.logs / "agent.log",
        stop_grace=10.0,
        what_it_means="engines go on serving, the next agent takes them over",
    )


def router_spec(settings: UpSettings, index: int, parent_pid: int) -> ChildSpec:
    at = settings.routers[index]
    argv: tuple[str, ...] = ("-m", "aerostat_router", "--cluster", settings.cluster, "--listen", at.http, "--grpc-listen", at.grpc)
    argv += ("--admin-listen", at.admin, "--name", f"router-{index}", "--drain-seconds", f"{DRAIN:g}", "--die-with-parent", str(parent_pid))
    return ChildSpec(
        name=f"router-{index}",
        argv=(sys.executable, *argv),
        log=settings.logs / f"router-{index}.log",
        stop_grace=DRAIN + 5.0,
        what_it_means="its streams are cut; clients retry",
    )
