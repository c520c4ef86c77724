"""Leases of this router's own calls: known here at once, told to their agents in batches.

The call never waits for an agent: a consumption is compare-and-delete there, and a router that loses it goes unreserved.
"""

from collections.abc import Callable

from aerostat_core.clock import Clock
from aerostat_core.defaults import LEASE_TTL
from aerostat_core.ids import LeaseId, Seconds
from aerostat_router.background import Background
from aerostat_router.calls import Call, Target
from aerostat_router.catalog import Catalog
from aerostat_router.fleet import Fleet
from aerostat_router.lease_outbox import LeaseOutbox
from aerostat_router.policy.placement import Discard
from aerostat_router.policy.views import Candidate, LeaseView
from aerostat_router.telemetry_client import AgentLink


class LeaseDesk:
    def __init__(
        self,
        *,
        router: str,
        catalog: Catalog,
        fleet: Fleet,
        link: Callable[[str], AgentLink | None],
        clock: Clock,
        background: Background,
    ) -> None:
        self._router = router
        self._catalog = catalog
        self._fleet = fleet
        self._link = link
        self._clock = clock
        self._background = background
        self._outboxes: dict[AgentLink, LeaseOutbox] = {}
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
        if (outbox := self._outbox(candidate)) is not None:
            outbox.install(lease)

    def consume(self, lease: LeaseView) -> None:
        self._fleet.leases.consume(lease)
        self._tell_spent(lease)

    def discard(self, lease: LeaseView, reason: Discard) -> None:
        self._fleet.leases.discard(lease, reason.value)
        self._tell_spent(lease)

    def _tell_spent(self, lease: LeaseView) -> None:
        candidate = self._fleet.candidate(lease.instance, lease.model)
        if candidate is not None and (outbox := self._outbox(candidate)) is not None:
            outbox.consume(lease)

    def _outbox(self, candidate: Candidate) -> LeaseOutbox | None:
        """None: no link leads to its agent any more."""
        link = self._link(candidate.source.address)
        if link is None:
            return None
        outbox = self._outboxes.get(link)
        if outbox is None:
            self._outboxes = {known: box for known, box in self._outboxes.items() if self._link(known.address) is known}
            outbox = self._outboxes[link] = LeaseOutbox(link.update_leases, self._refused, self._clock, self._background)
        return outbox

    def _refused(self, lease: LeaseView, reason: str) -> None:
        self._fleet.leases.refused(lease, "refused_by_agent")
