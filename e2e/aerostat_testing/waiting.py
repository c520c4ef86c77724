"""Waiting for what another process does. For our own code tests use events and virtual time instead."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from aerostat_core.ids import Seconds

T = TypeVar("T")
POLL: Seconds = 0.02
What = str | Callable[[], str]  # a function is asked when the time is over


class NotInTimeError(AssertionError):
    """What a test waited for did not happen before its deadline."""


def wait_for(probe: Callable[[], T | None], what: What, *, limit: Seconds = 10.0) -> T:
    """The probe's first answer that is true. Raises NotInTimeError that says what was waited for."""
    deadline = time.monotonic() + limit
    while True:
        if answer := probe():
            return answer
        if time.monotonic() >= deadline:
            raise _not_in_time(what, limit)
        time.sleep(POLL)


async def eventually(probe: Callable[[], T | None], what: What, *, limit: Seconds = 10.0) -> T:
    """`wait_for` that lets the loop run meanwhile."""
    deadline = time.monotonic() + limit
    while True:
        if answer := probe():
            return answer
        if time.monotonic() >= deadline:
            raise _not_in_time(what, limit)
        await asyncio.sleep(POLL)


def _not_in_time(what: What, limit: Seconds) -> NotInTimeError:
    return NotInTimeError(f"not within {limit:g} s: {what if isinstance(what, str) else what()}")
