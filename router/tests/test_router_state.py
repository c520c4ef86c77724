"""What the router remembers, under any order of events: in-flight counts, leases, the fleet. `check_integrity` after every step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aerostat_core.ids import Epoch, LeaseId, NamespacedName, SessionKey
from aerostat_core.latency import LatencyProfile
from aerostat_core.specs import EngineState
from aerostat_router.admin import why_not_ready
from aerostat_router.catalog import WATCHED, Catalog
from aerostat_router.fleet import AgentUpdate, Fleet
from aerostat_router.in_flight import Ticket
from aerostat_router.policy.views import EngineView, InstanceView, LeaseView, SessionView, Tier, Timing
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent
from aerostat_testing.declared import instance_object

pytestmark = pytest.mark.cpu

MODELS = tuple(NamespacedName("default", name) for name in ("m", "n"))
INSTANCES = tuple(NamespacedName("default", name) for name in ("a", "b"))
TIMING = Timing.of(LatencyProfile())
AGENTS = ("agent-1", "agent-2")

models, instances = st.sampled_from(MODELS), st.sampled_from(INSTANCES)
sessions = st.sampled_from([SessionKey(key) for key in ("s", "t", "u")])
epochs = st.integers(1, 3).map(Epoch)


def engine(instance: NamespacedName, model: NamespacedName, epoch: int) -> EngineView:
    return EngineView(instance=instance, model=model, state=EngineState.OPEN, epoch=Epoch(epoch), timing=TIMING, port=1)


def instance(name: NamespacedName, engines: tuple[EngineView, ...]) -> InstanceView:
    return InstanceView(name=name, pool="cpu", node="x", sharing="Concurrent", is_draining=False, engines=engines)


class RouterMemory(RuleBasedStateMachine):
    """Each agent has one instance, so that a name is told by one agent only, as in a cluster."""

    tickets = Bundle("tickets")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(lambda models: None)
        self.now = 0.0
        self.versions: dict[str, tuple[int, int]] = {}
        self.n_leases = 0
        self.n_open: dict[int, int] = {}

    @rule(i=st.integers(0, 1), epoch=epochs, held=st.sets(models), sessions=st.sets(sessions))
    def a_new_agent_tells_everything(self, i: int, epoch: Epoch, held: set[NamespacedName], sessions: set[SessionKey]) -> None:
        agent_epoch = self.versions.get(AGENTS[i], (0, 0))[0] + 1
        self.versions[AGENTS[i]] = (agent_epoch, 0)
        self._apply(i, agent_epoch, 0, epoch, held, sessions, is_full=True)

    @rule(i=st.integers(0, 1), epoch=epochs, held=st.sets(models), sessions=st.sets(sessions), forgotten=st.sets(sessions))
    def an_agent_tells_what_changed(
        self, i: int, epoch: Epoch, held: set[NamespacedName], sessions: set[SessionKey], forgotten: set[SessionKey]
    ) -> None:
        if AGENTS[i] in self.versions:
            agent_epoch, version = self.versions[AGENTS[i]]
            self.versions[AGENTS[i]] = (agent_epoch, version + 1)
            self._apply(i, agent_epoch, version + 1, epoch, held, sessions, forgotten=forgotten)

    def _apply(
        self,
        i: int,
        agent_epoch: int,
        version: int,
        epoch: Epoch,
        held: set[NamespacedName],
        sessions: set[SessionKey],
        *,
        is_full: bool = False,
        forgotten: set[SessionKey] = frozenset(),  # type: ignore[assignment]  # read only
    ) -> None:
        views = tuple(engine(INSTANCES[i], model, epoch) for model in sorted(held))
        told = tuple(
            SessionView(session=key, model=model, instance=INSTANCES[i], epoch=epoch, tier=Tier.DEVICE, n_tokens=16)
            for key in sorted(sessions)
            for model in MODELS
        )
        update = AgentUpdate(
            agent_epoch=agent_epoch,
            version=version,
            is_full=is_full,
            instances=(instance(INSTANCES[i], views),),
            sessions=told,
            forgotten_sessions=tuple(sorted(forgotten)),
        )
        assert self.fleet.apply(AGENTS[i], update, self.now)

    @rule(i=st.integers(0, 1), skipped=st.integers(2, 4))
    def a_gap_is_noticed_and_changes_nothing(self, i: int, skipped: int) -> None:
        agent_epoch, version = self.versions.get(AGENTS[i], (1, 0))
        update = AgentUpdate(agent_epoch=agent_epoch, version=version + skipped, is_full=False, removed_instances=INSTANCES)
        before = len(list(self.fleet.instances()))
        assert not self.fleet.apply(AGENTS[i], update, self.now)
        assert len(list(self.fleet.instances())) == before

    @rule(i=st.integers(0, 1))
    def an_older_agent_is_ignored(self, i: int) -> None:
        if AGENTS[i] in self.versions:
            before = len(list(self.fleet.instances()))
            assert self.fleet.apply(AGENTS[i], AgentUpdate(agent_epoch=0, version=9, is_full=True), self.now)
            assert len(list(self.fleet.instances())) == before

    @rule(i=st.integers(0, 1))
    def an_agent_is_dropped(self, i: int) -> None:
        self.fleet.drop(AGENTS[i])
        self.versions.pop(AGENTS[i], None)

    @rule(target=tickets, place=st.tuples(instances, models), tokens=st.integers(1, 50))
    def a_call_is_sent(self, place: tuple[NamespacedName, NamespacedName], tokens: int) -> Ticket | None:
        candidate = self.fleet.candidate(*place)
        return None if candidate is None else self.fleet.enter(candidate, seconds=tokens / 8, tokens=tokens)

    @rule(ticket=consumes(tickets), twice=st.booleans())
    def a_call_ends(self, ticket: Ticket | None, twice: bool) -> None:
        if ticket is not None:
            with ticket:
                pass
            if twice:
                ticket.close()

    @rule(target=leases, place=st.tuples(instances, models), session=sessions, epoch=epochs, ttl=st.floats(0.1, 5), published=st.booleans())
    def a_lease_is_made(
        self, place: tuple[NamespacedName, NamespacedName], session: SessionKey, epoch: Epoch, ttl: float, published: bool
    ) -> LeaseView:
        self.n_leases += 1
        lease = LeaseView(
            id=LeaseId(str(self.n_leases)), session=session, model=place[1], instance=place[0], epoch=epoch, expires_at=self.now + ttl
        )
        if published:
            self.fleet.leases.observe(session, lease.model, lease.instance, lease._replace(is_published=True))
        else:
            self.fleet.leases.install(lease)
        return lease

    @rule(lease=leases)
    def telemetry_repeats_a_lease(self, lease: LeaseView) -> None:
        if lease.expires_at > self.now:
            self.fleet.leases.observe(lease.session, lease.model, lease.instance, lease._replace(is_published=True))

    @rule(lease=leases)
    def telemetry_shows_none(self, lease: LeaseView) -> None:
        self.fleet.leases.observe(lease.session, lease.model, lease.instance, None)

    @rule(session=sessions, model=models, honoured=st.booleans())
    def a_session_returns(self, session: SessionKey, model: NamespacedName, honoured: bool) -> None:
        lease = self.fleet.leases.find(session, model, self.now)
        if lease is not None:
            assert lease.expires_at > self.now
            if honoured:
                self.fleet.leases.consume(lease)
            else:
                self.fleet.leases.discard(lease, "epoch")
            self.fleet.leases.observe(session, model, lease.instance, lease)  # telemetry has not heard yet
            assert self.fleet.leases.find(session, model, self.now) is None

    @rule(seconds=st.floats(0.01, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.leases.sweep(self.now)

    @invariant()
    def everything_adds_up(self) -> None:
        self.fleet.check_integrity()


RouterMemory.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestRouterMemory = RouterMemory.TestCase


def test_a_call_counts_beyond_the_snapshot_for_two_snapshots_and_an_end_after_that_counts_down() -> None:
    fleet = Fleet(lambda models: None)
    place = (INSTANCES[0], MODELS[0])

    def snapshot(version: int) -> None:
        told = (instance(INSTANCES[0], (engine(*place, 1),)),)
        assert fleet.apply("x", AgentUpdate(agent_epoch=1, version=version, is_full=version == 0, instances=told), 0)

    snapshot(0)
    candidate = fleet.candidate(*place)
    assert candidate is not None
    ticket = fleet.enter(candidate, seconds=1.0, tokens=10)
    counted = [candidate.load.n_calls]
    for version in (1, 2):
        snapshot(version)
        counted.append(candidate.load.n_calls)
    ticket.close()
    counted.append(candidate.load.n_calls)
    snapshot(3)
    counted.append(candidate.load.n_calls)
    assert counted == [1, 1, 0, -1, 0]


def test_a_router_is_ready_unless_there_are_agents_and_it_hears_none() -> None:
    fleet, catalog = Fleet(lambda models: None), Catalog(lambda: None)

    def declare(address: str) -> None:
        catalog.apply(WatchEvent(Change.ADDED, Kind.INSTANCE, instance_object("a", ["m"], address=address)))

    def why() -> str | None:
        return why_not_ready(catalog, fleet, is_draining=False)

    assert why() == "the declared objects have not been read yet"
    for kind in WATCHED:
        catalog.apply(WatchEvent(Change.SYNCED, kind, None))
    assert why() is None, "there is nothing to hear"
    declare("")
    assert why() is None, "its agent has not begun: calls are held meanwhile, or answered with a reason"
    declare(AGENTS[0])
    assert why() == "no node agent has been heard yet"
    update = AgentUpdate(agent_epoch=1, version=0, is_full=True, instances=(instance(INSTANCES[0], ()),))
    assert fleet.apply(AGENTS[0], update, 0.0)
    assert why() is None
    assert why_not_ready(catalog, fleet, is_draining=True) == "draining"
