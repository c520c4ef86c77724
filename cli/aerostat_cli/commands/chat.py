"""`aerostat chat MODEL`: talk to a model, and see after each turn how it was served."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from rich.console import Console

from aerostat_cli.chat_client import ChatSession
from aerostat_cli.standalone.run_state import find_run
from aerostat_core.errors import AerostatError

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("chat", help="talk to a model; Ctrl-D ends the session")
    parser.add_argument("model", metavar="MODEL", help="a served name, as /v1/models lists it")
    parser.add_argument("-m", "--message", metavar="TEXT", help="say this, print the answer and end")
    parser.add_argument("--url", help="a router, such as http://127.0.0.1:8080 (default: that of the running `aerostat up`)")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="the folder whose run is meant (default: here, else the newest)")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    url = args.url or f"http://{find_run(args.dir).routers[0].http}"
    answers = Console(highlight=False, soft_wrap=True)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with asyncio.Runner() as runner:
        client = httpx.AsyncClient()
        try:
            session = ChatSession(client, url=url.rstrip("/"), model=args.model, max_tokens=args.max_tokens)
            if args.message is not None:
                runner.run(_turn(session, args.message, answers, notes))
            else:
                _converse(runner, session, answers, notes)
        finally:
            runner.run(client.aclose())
    return 0


def _converse(runner: asyncio.Runner, session: ChatSession, answers: Console, notes: Console) -> None:
    """Turns until the input ends. Ctrl-C ends an answer, and at the prompt the session."""
    notes.print(f"session {session.session_id}; Ctrl-D ends it", style="dim", markup=False)
    while (text := _read_line()) is not None:
        if not text.strip():
            continue
        try:
            runner.run(_turn(session, text, answers, notes))
        except AerostatError as error:
            notes.print(f"\n{error}", style="red", markup=False)
        except KeyboardInterrupt:
            notes.print("\n(stopped; this turn is forgotten)", style="dim", markup=False)


async def _turn(session: ChatSession, text: str, answers: Console, notes: Console) -> None:
    async for delta in session.turn(text):
        answers.print(delta, end="", markup=False)
        answers.file.flush()
    answers.print()
    notes.print(str(session.report), style="dim", markup=False)


def _read_line() -> str | None:
    """None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
