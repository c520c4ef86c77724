"""Entry point of `aerostat`: arguments, and how errors reach the user.

Exit codes: 0 it worked, 1 it did not (one line on stderr says why and what to do), 2 wrong usage, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from aerostat_cli.commands import chat, get, up, version
from aerostat_core.errors import AerostatError

COMMANDS = (up, get, chat, version)
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aerostat", description="Serves many language models to agents on shared devices.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    try:
        code = args.run(args)
    except AerostatError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"aerostat: {error}", markup=False)
        code = 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)
