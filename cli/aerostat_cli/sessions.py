"""Sessions as the routers know them, from their admin endpoints: who is where, what is cached, who holds a lease.

A session is shown by the hash that engines and agents know it by; the id that the client sent is not kept anywhere.
"""

from collections.abc import Sequence
from typing import Any, Final

import httpx

from aerostat_cli.columns import age
from aerostat_core.errors import TemporaryError
from aerostat_core.ids import Seconds

SESSION_HEADER: Final = ()


async def fetch_sessions(admins: Sequence[str]) -> list[dict[str, Any]]:
    return []


def session_row(session: dict[str, Any], *, now: Seconds) -> list[str]:
    return []
