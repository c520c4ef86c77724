"""Leases as this router knows them: what agents publish, overlaid by what it just installed or consumed itself.

The agent is the only writer of leases on its instances; a router reports a completion to it and acts on its own knowledge until
telemetry has caught up. One lease per session and model; of two the one that expires later stands. Expiry is in this
router's own time. No I/O here: the calls to agents are `dispatch`'s.
"""

import heapq
from collections import Counter
from collections.abc import Callable

from aerostat_core.ids import Epoch, LeaseId, NamespacedName, Seconds, SessionKey
from aerostat_router.policy.views import LeaseView

Place = tuple[NamespacedName, NamespacedName]  # instance, model


class _Entry:
    __slots__ = ("is_published", "lease")

    def __init__(self, lease: LeaseView, *, is_published: bool) -> None:
        self.lease = lease
        self.is_published = is_published  # telemetry has shown it: its absence there means that it is gone


class LeaseTable:
    """Mutable. `on_units` hears of each change of the units that are held on a place; `counts` of (event, reason) is for metrics."""

    def __init__(self, on_units: Callable[[Place, int], None]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._on_units = on_units
        self._entries: dict[tuple[SessionKey, NamespacedName], _Entry] = {}
        self._units: Counter[Place] = Counter()
        self._n_leases: Counter[NamespacedName] = Counter()  # by model
        self._by_expiry: list[tuple[Seconds, LeaseId, SessionKey, NamespacedName]] = []
        self._spent: dict[LeaseId, Seconds] = {}  # consumed or discarded here; telemetry may still show them for a while

    def __len__(self) -> int:
        return len(self._entries)

    def install(self, lease: LeaseView) -> None:
        """This router saw the completion."""
        self.counts["installed", ""] += 1
        self._put(lease, is_published=False)

    def refused(self, lease: LeaseView, reason: str) -> None:
        """The agent did not take it."""
        entry = self._entries.get((lease.session, lease.model))
        if entry is not None and entry.lease.id == lease.id:
            self._remove(entry)
            self.counts["discarded", reason] += 1

    def observe(self, session: SessionKey, model: NamespacedName, instance: NamespacedName, lease: LeaseView | None) -> None:
        """What telemetry says about one session on one instance."""
        entry = self._entries.get((session, model))
        if lease is None:
            if entry is not None and entry.is_published and entry.lease.instance == instance:
                self._remove(entry)
            return
        if lease.id in self._spent:
            return
        if entry is not None and entry.lease.id != lease.id and entry.lease.expires_at > lease.expires_at:
            return
        self._put(lease, is_published=True)

    def find(self, session: SessionKey, model: NamespacedName, now: Seconds) -> LeaseView | None:
        self.sweep(now)
        entry = self._entries.get((session, model))
        return None if entry is None else entry.lease

    def consume(self, lease: LeaseView) -> None:
        self._spend(lease)
        self.counts["consumed", ""] += 1

    def discard(self, lease: LeaseView, reason: str) -> None:
        self._spend(lease)
        self.counts["discarded", reason] += 1

    def void(self, place: Place, *, but_epoch: Epoch | None = None) -> None:
        """The engine run behind these leases is over (`but_epoch` is the one that lives), or its agent is a new one."""
        if not self._units[place]:
            return
        for entry in [e for e in self._entries.values() if (e.lease.instance, e.lease.model) == place]:
            if entry.lease.epoch != but_epoch:
                self._remove(entry)
                self.counts["discarded", "epoch"] += 1

    def sweep(self, now: Seconds) -> None:
        """Drops what has expired: a heap's top at nearly every call."""
        while self._by_expiry and self._by_expiry[0][0] <= now:
            _, lease_id, session, model = heapq.heappop(self._by_expiry)
            self._spent.pop(lease_id, None)
            entry = self._entries.get((session, model))
            if entry is not None and entry.lease.id == lease_id and entry.lease.expires_at <= now:
                self._remove(entry)
                self.counts["expired", ""] += 1

    def units(self, place: Place) -> int:
        return self._units[place]

    def n_live(self, model: NamespacedName) -> int:
        return self._n_leases[model]

    def check_integrity(self) -> None:
        """Units add up, nothing is held twice, and whatever is known will expire."""
        units: Counter[Place] = Counter()
        n_leases: Counter[NamespacedName] = Counter()
        for (session, model), entry in self._entries.items():
            if (entry.lease.session, entry.lease.model) != (session, model):
                raise AssertionError(f"the lease of {entry.lease.session} is filed under {session}")
            if entry.lease.id in self._spent:
                raise AssertionError(f"lease {entry.lease.id} is live and spent")
            units[entry.lease.instance, model] += entry.lease.units
            n_leases[model] += 1
        if units != +self._units or n_leases != +self._n_leases:
            raise AssertionError(f"units {dict(self._units)} counted, {dict(units)} held")
        timed = {lease_id for _, lease_id, _, _ in self._by_expiry}
        if not {e.lease.id for e in self._entries.values()} | self._spent.keys() <= timed:
            raise AssertionError("a lease has no expiry")

    # Inside.

    def _put(self, lease: LeaseView, *, is_published: bool) -> None:
        old = self._entries.get((lease.session, lease.model))
        if old is not None:
            is_published = is_published or (old.is_published and old.lease.id == lease.id)
            self._remove(old)
        self._entries[lease.session, lease.model] = _Entry(lease, is_published=is_published)
        heapq.heappush(self._by_expiry, (lease.expires_at, lease.id, lease.session, lease.model))
        self._charge(lease, +1)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.lease.session, entry.lease.model]
        self._charge(entry.lease, -1)

    def _charge(self, lease: LeaseView, sign: int) -> None:
        place = (lease.instance, lease.model)
        self._units[place] += sign * lease.units
        self._n_leases[lease.model] += sign
        n = self._units[place]
        if not n:
            del self._units[place]
        if not self._n_leases[lease.model]:
            del self._n_leases[lease.model]
        self._on_units(place, n)

    def _spend(self, lease: LeaseView) -> None:
        entry = self._entries.get((lease.session, lease.model))
        if entry is not None and entry.lease.id == lease.id:
            self._remove(entry)
            self._spent[lease.id] = lease.expires_at
            heapq.heappush(self._by_expiry, (lease.expires_at, lease.id, lease.session, lease.model))
