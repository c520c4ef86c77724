"""Leases: one writer, idempotent by id, consumed once, void with their engine. Properties as a state machine."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aerostat_agent.policy.leases import MAX_TTL, Lease, LeaseTable
from aerostat_agent.policy.tracks import EngineKey
from aerostat_core.ids import Epoch, LeaseId, ModelName, NamespacedName, SessionKey

pytestmark = pytest.mark.cpu

ENGINES = [EngineKey(NamespacedName("default", "cpu-0"), ModelName(m)) for m in ("a", "b")]
LEASE = Lease(id=LeaseId("l1"), engine=ENGINES[0], session=SessionKey("s1"), epoch=Epoch(5), expires_at=11.0)


def install(table: LeaseTable, lease: Lease, now: float = 10.0, limit: int = 4) -> str:
    """The reason of a refusal, or nothing."""
    return table.install(lease, now=now, current_epoch=Epoch(5), limit=limit).reason


def test_a_lease_is_installed_once_however_often_it_is_asked_for() -> None:
    table = LeaseTable()
    first = table.install(LEASE, now=10.0, current_epoch=Epoch(5), limit=4)
    again = table.install(replace(LEASE, expires_at=99.0), now=10.5, current_epoch=Epoch(5), limit=4)
    assert first.lease == again.lease == LEASE
    assert table.units(ENGINES[0]) == 1


def test_whoever_consumes_second_goes_unreserved() -> None:
    table = LeaseTable()
    install(table, LEASE)
    assert table.consume(LEASE.id, LEASE.session, now=10.5) == LEASE
    assert table.consume(LEASE.id, LEASE.session, now=10.5) is None
    assert table.units(ENGINES[0]) == 0


def test_a_consumed_lease_does_not_come_back_with_a_repeated_install() -> None:
    table = LeaseTable()
    install(table, LEASE)
    table.consume(LEASE.id, LEASE.session, now=10.5)
    assert install(table, LEASE) == "AlreadyEnded"


def test_another_session_does_not_consume_it() -> None:
    table = LeaseTable()
    install(table, LEASE)
    assert table.consume(LEASE.id, SessionKey("s2"), now=10.5) is None
    assert table.of(ENGINES[0], LEASE.session, 10.5) == LEASE


def test_an_expired_lease_is_not_consumed() -> None:
    table = LeaseTable()
    install(table, LEASE)
    assert table.consume(LEASE.id, LEASE.session, now=11.0) is None


def test_a_new_epoch_refuses_leases_of_the_old_one_and_its_end_voids_those_there() -> None:
    table = LeaseTable()
    assert install(table, replace(LEASE, epoch=Epoch(4))) == "EngineChanged"
    assert table.install(LEASE, now=10.0, current_epoch=None, limit=4).reason == "EngineChanged"
    install(table, LEASE)
    assert table.void(ENGINES[0]) == (LEASE,)
    assert len(table) == 0


def test_a_newer_lease_of_a_session_replaces_the_older() -> None:
    table = LeaseTable()
    install(table, LEASE, limit=1)
    newer = replace(LEASE, id=LeaseId("l2"), expires_at=12.0)
    assert install(table, newer, limit=1) == ""
    assert table.consume(LEASE.id, LEASE.session, now=10.5) is None
    assert table.of(ENGINES[0], LEASE.session, 11.5) == newer


@pytest.mark.parametrize("ttl", [0.0, -1.0, MAX_TTL + 1])
def test_a_ttl_of_nothing_or_of_ages_is_refused(ttl: float) -> None:
    assert install(LeaseTable(), replace(LEASE, expires_at=10.0 + ttl)) == "BadTtl"


class Leases(RuleBasedStateMachine):
    """Against a plain model: which ids are live, who ended."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now = 0.0
        self.epochs = dict.fromkeys(ENGINES, 1)
        self.live: dict[str, Lease] = {}
        self.ended: set[str] = set()

    @rule(
        n=st.integers(0, 20),
        engine=st.sampled_from(ENGINES),
        session=st.sampled_from("uvwx"),
        ttl=st.floats(0.1, 5.0),
        lag=st.integers(0, 1),
    )
    def install(self, n: int, engine: EngineKey, session: str, ttl: float, lag: int) -> None:
        epoch = Epoch(self.epochs[engine] - lag)
        lease = Lease(id=LeaseId(f"l{n}"), engine=engine, session=SessionKey(session), epoch=epoch, expires_at=self.now + ttl)
        answer = self.table.install(lease, now=self.now, current_epoch=Epoch(self.epochs[engine]), limit=2)
        if lease.id in self.live:
            assert answer.lease == self.live[lease.id]
            return
        assert lease.id not in self.ended or answer.lease is None
        assert lag == 0 or answer.lease is None
        if answer.lease is not None:
            for older in [x for x in self.live.values() if (x.engine, x.session) == (engine, lease.session)]:
                self.end(older)
            self.live[lease.id] = lease

    @rule(n=st.integers(0, 20), session=st.sampled_from("uvwx"))
    def consume(self, n: int, session: str) -> None:
        lease = self.live.get(f"l{n}")
        consumed = self.table.consume(LeaseId(f"l{n}"), SessionKey(session), now=self.now)
        if lease is None or lease.session != session:
            assert consumed is None
        else:
            assert (consumed is not None) == (lease.expires_at > self.now)
            self.end(lease)

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.table.expire(self.now):
            self.end(lease)
        assert all(lease.expires_at > self.now for lease in self.live.values())

    @rule(engine=st.sampled_from(ENGINES))
    def engine_dies(self, engine: EngineKey) -> None:
        self.epochs[engine] += 1
        for lease in self.table.void(engine):
            self.end(lease)

    def end(self, lease: Lease) -> None:
        del self.live[lease.id]
        self.ended.add(lease.id)

    @invariant()
    def agrees(self) -> None:
        self.table.check_integrity()
        assert len(self.table) == len(self.live)
        assert all(self.table.units(engine) <= 2 for engine in ENGINES)
        assert all(lease.epoch == self.epochs[lease.engine] for lease in self.live.values())


Leases.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLeases = Leases.TestCase
