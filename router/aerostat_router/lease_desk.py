"""Leases of this router's own calls: known here at once, told to their agents in the background.

The call never waits for an agent: a consumption is compare-and-delete there, and a router that loses it goes unreserved.
"""

import logging
from collections.abc import Callable

from aerostat_core.defaults import LEASE_TTL
from aerostat_core.ids import LeaseId, Seconds
from aerostat_router.background import Background
from aerostat_router.calls import Call, Target
from aerostat_router.catalog import Catalog
from aerostat_router.fleet import Fleet
from aerostat_router.policy.placement import Discard
from aerostat_router.policy.views import LeaseView
from aerostat_router.telemetry_client import AgentLink, AgentUnreachableError
from aerostat_router.wire import consume_request, install_request

logger = logging.getLogger(__name__)


class LeaseDesk:
    def __init__(
        self, *, router: str, catalog: Catalog, fleet: Fleet, link: Callable[[str], AgentLink | None], background: Background
    ) -> None:
        self._router = router
        self._catalog = catalog
        self._fleet = fleet
        self._link = link
        self._background = background
        self._n_leases = 0

    def install(self, call: Call, target: Target, now: Seconds) -> None:
        """The call is complete. Nothing is installed where the engine run that served it is over, or where leases are off."""
        candidate = self._fleet.candidate(target.instance, target.model.name)
        ttl = self._catalog.lease_ttl(target.instance)
        ttl = LEASE_TTL if ttl is None else ttl
        if call.session is None or candidate is None or candidate.engine.epoch != target.epoch or ttl <= 0:
            return
        self._n_leases += 1
        lease = LeaseView(
            id=LeaseId(f"{self._router}-{self._n_leases}"),
            session=call.session,
            model=target.model.name,
            instance=target.instance,
            epoch=target.epoch,
            expires_at=now + ttl,
        )
        self._fleet.leases.install(lease)
        link = self._link(candidate.source.address)
        if link is not None:
            self._background.start(self._tell_installed(link, lease, ttl), name="install lease")

    def consume(self, lease: LeaseView) -> None:
        self._fleet.leases.consume(lease)
        self._tell_spent(lease)

    def discard(self, lease: LeaseView, reason: Discard) -> None:
        self._fleet.leases.discard(lease, reason.value)
        self._tell_spent(lease)

    def _tell_spent(self, lease: LeaseView) -> None:
        candidate = self._fleet.candidate(lease.instance, lease.model)
        link = self._link(candidate.source.address) if candidate is not None else None
        if link is not None:
            self._background.start(self._tell_consumed(link, lease), name="consume lease")

    async def _tell_installed(self, link: AgentLink, lease: LeaseView, ttl: Seconds) -> None:
        try:
            reply = await link.install_lease(install_request(lease, ttl))
        except AgentUnreachableError as error:
            logger.info("a lease stays this router's own: %s", error.message)
            return
        if not reply.installed:
            self._fleet.leases.refused(lease, "refused_by_agent")

    async def _tell_consumed(self, link: AgentLink, lease: LeaseView) -> None:
        try:
            await link.consume_lease(consume_request(lease))
        except AgentUnreachableError as error:
            logger.info("a spent lease will expire by itself: %s", error.message)
