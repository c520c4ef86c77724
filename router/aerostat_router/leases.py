"""Leases as this router knows them: what agents publish, overlaid by what it just installed or consumed itself.

The agent is the only writer of leases on its instances; a router reports a completion to it and acts on its own knowledge until
telemetry has caught up. One lease per session and model; of two the one that expires later stands. Expiry is in this
router's own time, as it was first known. No I/O here: the calls to agents are `dispatch`'s.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from aerostat_core.ids import Epoch, LeaseId, NamespacedName, Seconds, SessionKey
from aerostat_router.policy.views import LeaseView

Place = tuple[NamespacedName, NamespacedName]  # instance, model
Key = TypeVar("Key")


class LeaseTable:
    """Mutable. `on_units` hears of each change of the units that are held on a place; `counts` of (event, reason) is for metrics."""

    def __init__(self, on_units: Callable[[Place, int], None]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._on_units = on_units
        self._leases: dict[tuple[SessionKey, NamespacedName], LeaseView] = {}
        self._units: dict[Place, int] = {}
        self._n_leases: dict[NamespacedName, int] = {}  # by model
        self._by_expiry: list[tuple[Seconds, LeaseId, SessionKey, NamespacedName]] = []
        self._spent: dict[LeaseId, Seconds] = {}  # consumed or discarded here; telemetry may still show them for a while

    def __len__(self) -> int:
        return len(self._leases)

    def install(self, lease: LeaseView) -> None:
        """This router saw the completion."""
        self.counts["installed", ""] += 1
        self._put(lease)

    def refused(self, lease: LeaseView, reason: str) -> None:
        """The agent did not take it."""
        known = self._leases.get((lease.session, lease.model))
        if known is not None and known.id == lease.id:
            self._remove(known)
            self.counts["discarded", reason] += 1

    def observe(self, session: SessionKey, model: NamespacedName, instance: NamespacedName, lease: LeaseView | None) -> None:
        """What telemetry says about one session on one instance."""
        known = self._leases.get((session, model))
        if lease is None:
            if known is not None and known.is_published and known.instance == instance:
                self._remove(known)
        elif known is not None and known.id == lease.id:
            if not known.is_published:
                self._leases[session, model] = known._replace(is_published=True)
        elif lease.id not in self._spent and (known is None or known.expires_at <= lease.expires_at):
            self._put(lease)

    def find(self, session: SessionKey, model: NamespacedName, now: Seconds) -> LeaseView | None:
        self.sweep(now)
        return self._leases.get((session, model))

    def consume(self, lease: LeaseView) -> None:
        self._spend(lease)
        self.counts["consumed", ""] += 1

    def discard(self, lease: LeaseView, reason: str) -> None:
        self._spend(lease)
        self.counts["discarded", reason] += 1

    def void(self, place: Place, *, but_epoch: Epoch | None = None) -> None:
        """The engine run behind these leases is over (`but_epoch` is the one that lives), or its agent is a new one."""
        if place not in self._units:
            return
        for lease in [known for known in self._leases.values() if (known.instance, known.model) == place]:
            if lease.epoch != but_epoch:
                self._remove(lease)
                self.counts["discarded", "epoch"] += 1

    def sweep(self, now: Seconds) -> None:
        """Drops what has expired: a heap's top at nearly every call."""
        while self._by_expiry and self._by_expiry[0][0] <= now:
            _, lease_id, session, model = heapq.heappop(self._by_expiry)
            self._spent.pop(lease_id, None)
            known = self._leases.get((session, model))
            if known is not None and known.id == lease_id and known.expires_at <= now:
                self._remove(known)
                self.counts["expired", ""] += 1

    def units(self, place: Place) -> int:
        return self._units.get(place, 0)

    def n_live(self, model: NamespacedName) -> int:
        return self._n_leases.get(model, 0)

    def check_integrity(self) -> None:
        """Units add up, nothing is held twice, and whatever is known will expire."""
        units: Counter[Place] = Counter()
        n_leases: Counter[NamespacedName] = Counter()
        for (session, model), lease in self._leases.items():
            if (lease.session, lease.model) != (session, model):
                raise AssertionError(f"the lease of {lease.session} is filed under {session}")
            if lease.id in self._spent:
                raise AssertionError(f"lease {lease.id} is live and spent")
            units[lease.instance, model] += lease.units
            n_leases[model] += 1
        if units != self._units or n_leases != self._n_leases:
            raise AssertionError(f"units {dict(self._units)} counted, {dict(units)} held")
        timed = {lease_id for _, lease_id, _, _ in self._by_expiry}
        if not {lease.id for lease in self._leases.values()} | self._spent.keys() <= timed:
            raise AssertionError("a lease has no expiry")

    # Inside.

    def _put(self, lease: LeaseView) -> None:
        old = self._leases.get((lease.session, lease.model))
        if old is not None:
            self._remove(old)
        self._leases[lease.session, lease.model] = lease
        heapq.heappush(self._by_expiry, (lease.expires_at, lease.id, lease.session, lease.model))
        self._charge(lease, +1)

    def _remove(self, lease: LeaseView) -> None:
        del self._leases[lease.session, lease.model]
        self._charge(lease, -1)

    def _charge(self, lease: LeaseView, sign: int) -> None:
        place = (lease.instance, lease.model)
        n_units = _add(self._units, place, sign * lease.units)
        _add(self._n_leases, lease.model, sign)
        self._on_units(place, n_units)

    def _spend(self, lease: LeaseView) -> None:
        known = self._leases.get((lease.session, lease.model))
        if known is not None and known.id == lease.id:
            self._remove(known)
            self._spent[lease.id] = known.expires_at


def _add(sums: dict[Key, int], key: Key, n: int) -> int:
    """Returns the sum; keeps none that is 0."""
    total = sums[key] = sums.get(key, 0) + n
    if not total:
        del sums[key]
    return total
