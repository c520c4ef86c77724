"""Waiting for what another process does. For our own code tests use events and virtual time instead."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from aerostat_core.ids import Seconds

T = TypeVar("T")
POLL: Seconds = 0.02


class NotInTimeError(AssertionError):
    """What a test waited for did not happen before its deadline."""


def wait_for(probe: Callable[[], T | None], what: str, *, limit: Seconds = 10.0) -> T:
    """The probe's first answer that is true. Raises NotInTimeError that says what was waited for."""
    deadline = time.monotonic() + limit
    while True:
        if answer := probe():
            return answer
        if time.monotonic() >= deadline:
            raise NotInTimeError(f"not within {limit:g} s: {what}")
        time.sleep(POLL)


async def eventually(probe: Callable[[], T | None], what: str, *, limit: Seconds = 10.0) -> T:
    """`wait_for` that lets the loop run meanwhile."""
    deadline = time.monotonic() + limit
    while True:
        if answer := probe():
            return answer
        if time.monotonic() >= deadline:
            raise NotInTimeError(f"not within {limit:g} s: {what}")
        await asyncio.sleep(POLL)
