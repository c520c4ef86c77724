"""The agent's settings: made once of its arguments, frozen, passed in."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aerostat_core.addresses import Address
from aerostat_core.errors import SettingError
from aerostat_core.ids import Bytes, NodeName, Seconds
from aerostat_core.quantities import parse_size

_LAUNCHER: Final = (sys.executable, "-m", "aerostat_engine.launch")
_PREPARER: Final = (sys.executable, "-m", "aerostat_engine.prepare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`launcher` gets a launch spec as its last argument, `preparer` `--uri URI --cache DIR`."""

    node: NodeName
    cluster: str
    run_dir: Path
    model_cache: Path
    model_cache_limit: Bytes | None
    telemetry_listen: Address
    admin_listen: Address
    parent_pid: int | None
    start_limit: Seconds
    tls_dir: Path | None = None
    keeper_limit: Seconds = 30.0  # for a keeper to answer
    launcher: tuple[str, ...] = _LAUNCHER
    preparer: tuple[str, ...] = _PREPARER

    @property
    def keeper_socket(self) -> Path:
        return self.run_dir / "keeper.sock"

    @property
    def agent_socket(self) -> Path:
        return self.run_dir / "agent.sock"

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"


def parse_settings(argv: Sequence[str] | None = None) -> Settings:
    """Raises SettingError. A usage error ends the process, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m aerostat_agent", description="Aerostat's node agent")
    add = parser.add_argument
    add("--node", required=True, help="the name of this node, as Instances have it")
    add("--cluster", required=True, help="where the objects are: folder:STATE, or kubernetes:")
    add("--run-dir", type=Path, required=True, help="private folder of the node's sockets; keeper.sock is there")
    add("--model-cache", type=Path, required=True, help="where prepared models are kept")
    add("--model-cache-limit", default="", metavar="SIZE", help="such as 500Gi; what no Instance needs leaves for it (default: no limit)")
    add("--telemetry-listen", default="127.0.0.1:0", metavar="HOST:PORT", help="gRPC for routers (default 127.0.0.1, any port)")
    add("--admin-listen", default="127.0.0.1:0", metavar="HOST:PORT", help="metrics and health (default 127.0.0.1, any port)")
    add("--die-with-parent", type=int, metavar="PID", help="end when this parent process ends; engines stay")
    add("--start-limit", type=float, default=600.0, metavar="SECONDS", help="for an engine to become ready (default 600)")
    add("--keeper-limit", type=float, default=30.0, metavar="SECONDS", help="for the keeper to answer; inf: wait (default 30)")
    add("--launcher", default=shlex.join(_LAUNCHER), help="command that runs an engine; gets the launch spec as its last argument")
    add("--preparer", default=shlex.join(_PREPARER), help="command that puts a model's weights on disk")
    add("--tls-dir", type=Path, metavar="DIR", help="mutual TLS with routers and engines, by tls.crt, tls.key and ca.crt there")
    args = parser.parse_args(argv)
    if args.start_limit <= 0:
        raise SettingError(f"--start-limit must be more than 0 seconds, got {args.start_limit}")
    if not args.keeper_limit > 0:
        raise SettingError(f"--keeper-limit must be more than 0 seconds, got {args.keeper_limit}")
    if not args.run_dir.is_dir():
        raise SettingError(f"--run-dir {args.run_dir} is no folder: make one, with mode 0700")
    try:
        model_cache_limit = parse_size(args.model_cache_limit) if args.model_cache_limit else None
    except ValueError as error:
        raise SettingError(f"--model-cache-limit: {error}") from error
    return Settings(
        node=NodeName(args.node),
        cluster=args.cluster,
        run_dir=args.run_dir.absolute(),
        model_cache=args.model_cache.absolute(),
        model_cache_limit=model_cache_limit,
        telemetry_listen=Address.parse(args.telemetry_listen, "--telemetry-listen"),
        admin_listen=Address.parse(args.admin_listen, "--admin-listen"),
        parent_pid=args.die_with_parent,
        start_limit=args.start_limit,
        tls_dir=args.tls_dir,
        keeper_limit=args.keeper_limit,
        launcher=tuple(shlex.split(args.launcher)),
        preparer=tuple(shlex.split(args.preparer)),
    )
