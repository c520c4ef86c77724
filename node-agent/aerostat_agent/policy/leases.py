"""Soft reservations for sessions that will likely return (design.md section 6). The agent is their only writer.

A lease holds admission units on one engine until it is consumed, expires, or its engine is another one (epoch). It pins no
memory. Ids are the routers' own; an id that was consumed, replaced or has expired is remembered for a while, so that a
repeated install cannot bring it back.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aerostat_agent.policy.tracks import EngineKey
from aerostat_core.ids import Epoch, LeaseId, Seconds, SessionKey

MAX_TTL: Final[Seconds] = 300.0
MAX_LEASES: Final = 8192
MAX_ENDED: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    id: LeaseId
    engine: EngineKey
    session: SessionKey
    epoch: Epoch
    expires_at: Seconds  # on the clock that `now` comes from
    units: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """`lease` is None when it was refused; `reason` says why, CamelCase."""

    lease: Lease | None
    reason: str = ""


class LeaseTable:
    """Mutable. One lease per engine and session; at most `limit` units per engine, as many as it may run at once."""

    def __init__(self) -> None:
        self._by_session: dict[tuple[EngineKey, SessionKey], Lease] = {}
        self._by_id: dict[LeaseId, Lease] = {}
        self._units: dict[EngineKey, int] = {}
        self._ended: OrderedDict[LeaseId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, engine: EngineKey, session: SessionKey, now: Seconds) -> Lease | None:
        lease = self._by_session.get((engine, session))
        return lease if lease is not None and lease.expires_at > now else None

    def units(self, engine: EngineKey) -> int:
        return self._units.get(engine, 0)

    def install(self, lease: Lease, *, now: Seconds, current_epoch: Epoch | None, limit: int) -> Installed:
        """Idempotent by id. A newer lease of the same session takes the older one's place. `limit` is in units."""
        if (known := self._by_id.get(lease.id)) is not None:
            return Installed(lease=known)
        if lease.id in self._ended:
            return Installed(lease=None, reason="AlreadyEnded")
        if current_epoch is None or lease.epoch != current_epoch:
            return Installed(lease=None, reason="EngineChanged")
        if lease.expires_at <= now or lease.expires_at > now + MAX_TTL:
            return Installed(lease=None, reason="BadTtl")
        older = self._by_session.get((lease.engine, lease.session))
        freed = older.units if older is not None else 0
        if len(self) - (older is not None) >= MAX_LEASES or self.units(lease.engine) - freed + lease.units > limit:
            return Installed(lease=None, reason="NoAdmissionUnit")
        if older is not None:
            self._end(older)
        self._by_session[lease.engine, lease.session] = lease
        self._by_id[lease.id] = lease
        self._units[lease.engine] = self.units(lease.engine) + lease.units
        return Installed(lease=lease)

    def consume(self, lease_id: LeaseId, session: SessionKey, *, now: Seconds) -> Lease | None:
        """Compare and delete: None for whoever comes second, and for a lease that has expired."""
        lease = self._by_id.get(lease_id)
        if lease is None or lease.session != session:
            return None
        self._end(lease)
        return lease if lease.expires_at > now else None

    def expire(self, now: Seconds) -> tuple[Lease, ...]:
        """Drop what has run out, and say what that was."""
        return self._end_all(lambda lease: lease.expires_at <= now)

    def void(self, engine: EngineKey) -> tuple[Lease, ...]:
        """The engine's process is gone, or drains: nothing is held there any more."""
        return self._end_all(lambda lease: lease.engine == engine)

    def _end_all(self, is_over: Callable[[Lease], bool]) -> tuple[Lease, ...]:
        over = tuple(lease for lease in self._by_id.values() if is_over(lease))
        for lease in over:
            self._end(lease)
        return over

    def _end(self, lease: Lease) -> None:
        del self._by_id[lease.id]
        del self._by_session[lease.engine, lease.session]
        self._units[lease.engine] -= lease.units
        if not self._units[lease.engine]:
            del self._units[lease.engine]
        self._ended[lease.id] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def check_integrity(self) -> None:
        """Raises AssertionError. Run after every step of a property test."""
        assert set(self._by_session.values()) == set(self._by_id.values())
        assert all(self._by_session[lease.engine, lease.session] is lease for lease in self._by_id.values())
        assert all(self.units(e) == sum(x.units for x in self._by_id.values() if x.engine == e) for e in self._units)
        assert set(self._units) == {lease.engine for lease in self._by_id.values()}
        assert not set(self._ended) & set(self._by_id)
        assert len(self._by_id) <= MAX_LEASES
        assert len(self._ended) <= MAX_ENDED
