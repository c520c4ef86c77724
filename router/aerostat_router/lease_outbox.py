"""What one agent has still to be told of leases. A message has all that happened while the one before was under way.

Nobody waits for it: a lease that the agent never hears of stays this router's own, a spent one expires there by itself. So the outbox
is bounded and drops what it cannot hold, and nothing is sent twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from aerostat_core.clock import Clock
from aerostat_core.ids import LeaseId, Seconds
from aerostat_router.background import Background
from aerostat_router.policy.views import LeaseView
from aerostat_router.telemetry_client import AgentUnreachableError

logger = logging.getLogger(__name__)

COALESCE: Final[Seconds] = 0.005
MAX_WAITING: Final = 4096  # of each kind

# Tells the agent what was consumed, then what was installed, by its time left; returns the reasons of refusals.
Tell = Callable[[list[LeaseView], list[tuple[LeaseView, Seconds]]], Awaitable[dict[LeaseId, str]]]


class LeaseOutbox:
    """Mutable. `on_refused` hears of each lease that the agent did not take."""

    def __init__(self, tell: Tell, on_refused: Callable[[LeaseView, str], None], clock: Clock, background: Background) -> None:
        self._tell = tell
        self._on_refused = on_refused
        self._clock = clock
        self._background = background
        self._installed: dict[LeaseId, LeaseView] = {}
        self._consumed: list[LeaseView] = []
        self._is_sending = False

    def __len__(self) -> int:
        return len(self._installed) + len(self._consumed)

    def install(self, lease: LeaseView) -> None:
        if len(self._installed) < MAX_WAITING:
            self._installed[lease.id] = lease
            self._send_soon()

    def consume(self, lease: LeaseView) -> None:
        """Of a lease that the agent has not heard of yet it never will."""
        if self._installed.pop(lease.id, None) is None and len(self._consumed) < MAX_WAITING:
            self._consumed.append(lease)
            self._send_soon()

    def _send_soon(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self._background.start(self._send(), name="lease updates")

    async def _send(self) -> None:
        try:
            while self:
                await asyncio.sleep(COALESCE)
                consumed, self._consumed = self._consumed, []
                installed, self._installed = self._installed, {}
                if consumed or installed:
                    await self._send_these(consumed, installed)
        finally:
            self._is_sending = False

    async def _send_these(self, consumed: list[LeaseView], installed: dict[LeaseId, LeaseView]) -> None:
        now = self._clock.monotonic()
        alive = [(lease, lease.expires_at - now) for lease in installed.values() if lease.expires_at > now]
        try:
            refused = await self._tell(consumed, alive)
        except AgentUnreachableError as error:
            logger.info("%d leases stay this router's own, %d spent ones will expire: %s", len(alive), len(consumed), error.message)
            return
        for lease_id, reason in refused.items():
            if lease_id in installed:
                self._on_refused(installed[lease_id], reason)
