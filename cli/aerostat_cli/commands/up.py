"""`aerostat up DIR`: serve the models that a folder of manifests declares, until Ctrl-C."""

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from aerostat_cli.standalone import parent
from aerostat_cli.standalone.run_state import STATE_FOLDER
from aerostat_cli.standalone.settings import UpSettings, router_addresses
from aerostat_core.errors import SettingError
from aerostat_core.quantities import parse_size
from aerostat_runtime.cluster.state_lock import StateLock

if TYPE_CHECKING:
    from argparse import _SubParsersAction

MAX_ROUTERS = 16


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("up", help="serve the models that the manifests of a folder declare")
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder of manifests; edits are followed while it runs")
    parser.add_argument("--port", type=int, default=8080, help="HTTP port of the first router; the next ones follow (default: %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=50051, help="gRPC port of the first router (default: %(default)s)")
    parser.add_argument("--admin-port", type=int, default=9900, help="port of health, metrics and sessions (default: %(default)s)")
    parser.add_argument("--routers", type=int, default=1, metavar="N", help="router processes (default: %(default)s)")
    parser.add_argument("--model-cache", type=Path, metavar="DIR", help="converted weights (default: ~/.cache/aerostat/models)")
    parser.add_argument(
        "--model-cache-limit", default="", metavar="SIZE", help="such as 200Gi; what no model needs goes for it (default: none)"
    )
    parser.add_argument("--state", type=Path, metavar="DIR", help=f"state and logs (default: DIR/{STATE_FOLDER})")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    manifests = args.dir.resolve()
    if not manifests.is_dir():
        raise SettingError(f"{args.dir} is no folder. Make it, put manifests in it (crds/samples/quickstart shows some), then start again")
    if not 1 <= args.routers <= MAX_ROUTERS:
        raise SettingError(f"--routers: {args.routers} is not between 1 and {MAX_ROUTERS}")
    state = (args.state or manifests / STATE_FOLDER).resolve()
    model_cache = (args.model_cache or _default_cache()).resolve()
    if model_cache.exists() and not model_cache.is_dir():
        raise SettingError(f"--model-cache: {model_cache} is no folder; name one, it is made where there is none")
    with StateLock(state):
        settings = UpSettings(
            manifests=manifests,
            state=state,
            model_cache=model_cache,
            model_cache_limit=_limit(args.model_cache_limit),
            routers=router_addresses(args.routers, http=args.port, grpc=args.grpc_port, admin=args.admin_port),
        )
        return asyncio.run(parent.serve(settings))


def _limit(text: str) -> str:
    if text:
        try:
            parse_size(text)
        except ValueError as error:
            raise SettingError(f"--model-cache-limit: {error}") from error
    return text


def _default_cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "aerostat" / "models"
