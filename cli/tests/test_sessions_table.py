"""`aerostat get sessions`."""

import pytest

from aerostat_cli.sessions import SESSION_HEADER, fetch_sessions, session_row
from aerostat_core.errors import TemporaryError
from aerostat_testing.ports import free_port

pytestmark = pytest.mark.cpu

SESSION = {
    "session": "0123456789abcdef0123456789abcdef",
    "namespace": "default",
    "model": "qwen",
    "instance": "cpu-local-0",
    "tier": "device",
    "tokens": 512,
    "turns": 3,
    "suspended": False,
    "lastFinishedAt": 100.0,
    "lease": {"id": "router-0-1", "expiresInSeconds": 0.75},
}


def test_a_session_is_one_line() -> None:
    row = session_row(SESSION, now=101.0)
    assert row == ["0123456789abcdef", "qwen", "cpu-local-0", "device", "512", "3", "750ms left", "1s ago"]
    assert len(row) == len(SESSION_HEADER)


def test_a_session_without_a_lease_says_nothing_of_one() -> None:
    assert session_row(SESSION | {"lease": None}, now=101.0)[6] == ""


async def test_routers_that_do_not_answer_are_named() -> None:
    admin = f"127.0.0.1:{free_port()}"
    with pytest.raises(TemporaryError, match=f"no router answers at {admin}"):
        await fetch_sessions([admin])
