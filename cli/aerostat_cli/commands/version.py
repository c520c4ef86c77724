"""`aerostat version`: ours and that of the engine that it was built for."""

import argparse
import importlib.metadata
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("version", help="print the versions of aerostat and its engine")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    for package in ("aerostat", "sglang", "torch"):
        console.print(f"{package} {_version(package)}", markup=False)
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (extra: engine)"
