"""Sessions as a router knows them, from its admin endpoint: who is where, what is cached, who holds a lease.

A session is shown by the hash that engines and agents know it by; the id that a client sent is kept nowhere. Every router
has the same from telemetry, so the first one that answers is asked.
"""

from collections.abc import Sequence
from typing import Any, Final

import httpx

from aerostat_cli.columns import NONE, format_age
from aerostat_core.errors import TemporaryError
from aerostat_core.ids import Seconds
from aerostat_core.quantities import format_duration

SESSION_HEADER: Final = ("SESSION", "MODEL", "INSTANCE", "TIER", "TOKENS", "TURNS", "LEASE", "LAST TURN")
ADMIN_LIMIT: Final[Seconds] = 5.0

Session = dict[str, Any]


async def fetch_sessions(admins: Sequence[str]) -> list[Session]:
    """The most recent first. Raises TemporaryError when no router answers."""
    async with httpx.AsyncClient(timeout=ADMIN_LIMIT) as client:
        for admin in admins:
            try:
                response = await client.get(f"http://{admin}/admin/v1/sessions")
                response.raise_for_status()
            except httpx.HTTPError:
                continue
            sessions: list[Session] = response.json()["sessions"]
            return sessions
    raise TemporaryError("Unreachable", f"no router answers at {', '.join(admins)}; its log says why", retry_after=1.0)


def session_row(session: Session, *, now: Seconds) -> list[str]:
    """`now` is wall-clock seconds."""
    lease = session["lease"]
    return [
        session["session"][:16],
        session["model"],
        session["instance"],
        session["tier"],
        str(session["tokens"]),
        str(session["turns"]),
        NONE if lease is None else f"{format_duration(lease['expiresInSeconds'])} left",
        f"{format_age(now - session['lastFinishedAt'])} ago",
    ]
