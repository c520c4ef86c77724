"""`aerostat get KIND`: what is declared and how it is, in the columns that `kubectl get` shows."""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml
from rich.console import Console

from aerostat_cli.columns import columns_of, header, row
from aerostat_cli.sessions import SESSION_HEADER, fetch_sessions, session_row
from aerostat_cli.standalone.run_state import Run, find_run
from aerostat_core.errors import SettingError
from aerostat_core.resources import Resource
from aerostat_runtime.cluster.folder import FolderCluster
from aerostat_runtime.cluster.manifests import read_rejections
from aerostat_runtime.cluster.port import Kind
from aerostat_runtime.cluster.schema import crds_folder

if TYPE_CHECKING:
    from argparse import _SubParsersAction

KINDS: Final = {"models": Kind.MODEL, "pools": Kind.POOL, "slos": Kind.SLO, "instances": Kind.INSTANCE}
SESSIONS: Final = "sessions"
_SHORT_NAMES: Final = {"mdl": "models", "model": "models", "pool": "pools", "slo": "slos", "inst": "instances", "instance": "instances"}


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("get", help="show models, pools, slos, instances or sessions")
    parser.add_argument("what", metavar="KIND", type=_plural, choices=[*KINDS, SESSIONS], help="models, pools, slos, instances, sessions")
    parser.add_argument("name", nargs="?", metavar="NAME", help="only this one")
    parser.add_argument("-o", "--output", choices=["table", "wide", "json", "yaml"], default="table", help="default: %(default)s")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="the folder whose run is meant (default: here, else the newest)")
    parser.add_argument("--router", metavar="HOST:PORT", help="sessions as the router with this admin address has them, wherever it runs")
    parser.set_defaults(run=run)


def _plural(word: str) -> str:
    return _SHORT_NAMES.get(word, word)


def run(args: argparse.Namespace) -> int:
    found = _chosen_run(args)
    objects = asyncio.run(fetch_sessions([args.router]) if found is None else _objects(found, args.what))
    if args.name is not None:
        objects = [o for o in objects if o.get("metadata", o).get("name") == args.name]
    console = Console(highlight=False, soft_wrap=True)
    if args.output == "json":
        console.print(json.dumps({"items": objects}, indent=2), markup=False)
    elif args.output == "yaml":
        console.print(yaml.safe_dump({"items": objects}, sort_keys=False), end="", markup=False)
    else:
        console.print(_table(args.what, objects, wide=args.output == "wide"), markup=False)
        if found is not None:
            _show_rejections(found)
    return 0


def _chosen_run(args: argparse.Namespace) -> Run | None:
    """None: no run of this machine is meant, but one router."""
    if args.router is None:
        return find_run(args.dir)
    if args.what != SESSIONS:
        raise SettingError(f"--router has sessions only; {args.what} of a Kubernetes cluster are shown by `kubectl get {args.what}`")
    return None


async def _objects(found: Run, what: str) -> list[Resource]:
    if what == SESSIONS:
        return await fetch_sessions([router.admin for router in found.routers])
    cluster = FolderCluster(Path(found.state))
    try:
        return await cluster.list(KINDS[what])
    finally:
        await cluster.close()


def _table(what: str, objects: Sequence[Resource], *, wide: bool) -> str:
    if not objects:
        return f"no {what}"
    now = time.time()
    if what == SESSIONS:
        return _drawn(SESSION_HEADER, [session_row(o, now=now) for o in objects])
    columns = columns_of(_crd(KINDS[what]), wide=wide)
    return _drawn(header(columns), [row(o, columns, now=now) for o in objects])


def _crd(kind: Kind) -> Resource:
    crds: list[Resource] = [yaml.safe_load(path.read_text()) for path in sorted(crds_folder().glob("*.yaml"))]
    return next(crd for crd in crds if crd["spec"]["names"]["kind"] == kind)


def _drawn(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, as kubectl draws them; nothing is cut, so that the output can be piped on."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in (titles, *rows))
    return "\n".join(lines)


def _show_rejections(found: Run) -> None:
    """Under the table, on stderr: what the user wrote and does not see above."""
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    for rejection in read_rejections(Path(found.state)):
        notes.print(f"rejected {rejection}", style="yellow", markup=False)
