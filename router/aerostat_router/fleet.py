"""What the router knows of the instances: engines by model, sessions by key, and who said it when.

It is a cache of telemetry and nothing else. A new agent epoch voids all that the old agent said; a new engine epoch voids what was known
about the old run. Nobody awaits here; `apply` is the only way in.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from aerostat_core.defaults import STALE_AFTER
from aerostat_core.ids import NamespacedName, Seconds, SessionKey
from aerostat_router.in_flight import EngineLoad, Ticket
from aerostat_router.leases import LeaseTable, Place
from aerostat_router.policy.demand import Demand
from aerostat_router.policy.views import Candidate, EngineView, InstanceView, Load, SessionView, Source

NO_EPOCH: Final = 0  # of a session of which nothing is held any more: said of the present run
NO_HOLDINGS: Final[Mapping[NamespacedName, SessionView]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentUpdate:
    """One telemetry message. `is_full` replaces all that is known of the agent."""

    agent_epoch: int
    version: int
    is_full: bool
    instances: tuple[InstanceView, ...] = ()
    removed_instances: tuple[NamespacedName, ...] = ()
    sessions: tuple[SessionView, ...] = ()
    forgotten_sessions: tuple[SessionKey, ...] = ()
    demand: tuple[Demand, ...] = ()


@dataclass(slots=True)
class _Agent:
    """What one agent told. `sessions` are those that it has spoken of, with what of them it holds."""

    source: Source
    epoch: int = 0
    version: int = 0
    instances: dict[NamespacedName, InstanceView] = field(default_factory=dict)
    sessions: dict[SessionKey, set[Place]] = field(default_factory=dict)
    demand: dict[NamespacedName, Demand] = field(default_factory=dict)


class Fleet:
    """Mutable. `on_change` is called after each update with the models whose candidates or load changed."""

    def __init__(self, on_change: Callable[[Collection[NamespacedName]], None]) -> None:
        self.leases = LeaseTable(self._set_units)
        self._on_change = on_change
        self._agents: dict[str, _Agent] = {}
        self._candidates: dict[Place, Candidate] = {}
        self._loads: dict[Place, EngineLoad] = {}
        self._by_model: dict[NamespacedName, list[Candidate]] = {}
        self._sessions: dict[SessionKey, dict[Place, SessionView]] = {}

    # Questions.

    def candidates(self, model: NamespacedName) -> Sequence[Candidate]:
        return self._by_model.get(model, ())

    def candidate(self, instance: NamespacedName, model: NamespacedName) -> Candidate | None:
        return self._candidates.get((instance, model))

    def holdings(self, session: SessionKey | None, model: NamespacedName) -> Mapping[NamespacedName, SessionView]:
        """What is held of a session, by instance; entries of engine runs that are over are not among them."""
        places = self._sessions.get(session) if session is not None else None
        if not places:
            return NO_HOLDINGS
        return {instance: view for (instance, held_model), view in places.items() if held_model == model}

    def knows(self, session: SessionKey) -> bool:
        return session in self._sessions

    def enter(self, candidate: Candidate, *, seconds: Seconds, tokens: int) -> Ticket:
        """Counts a call that is sent to the candidate now."""
        return self._loads[candidate.engine.instance, candidate.engine.model].enter(seconds, tokens)

    def n_in_flight(self, place: Place) -> int:
        return self._loads[place].n_in_flight

    def demand(self, model: NamespacedName) -> Demand | None:
        """The sum over all routers, as the agents last said."""
        sums = [agent.demand[model] for agent in self._agents.values() if model in agent.demand]
        return max(sums, key=lambda d: d.arrivals, default=None)  # each agent hears of every router

    def agents(self) -> Iterator[tuple[Source, int, int]]:
        """Source, agent epoch and version."""
        for agent in self._agents.values():
            yield agent.source, agent.epoch, agent.version

    def instances(self) -> Iterator[tuple[InstanceView, Source]]:
        for agent in self._agents.values():
            for instance in agent.instances.values():
                yield instance, agent.source

    def sessions(self) -> Iterator[SessionView]:
        for places in self._sessions.values():
            yield from places.values()

    def is_fresh(self, address: str, now: Seconds) -> bool:
        agent = self._agents.get(address)
        return agent is not None and agent.source.heard_at >= now - STALE_AFTER

    # The way in.

    def apply(self, address: str, update: AgentUpdate, now: Seconds) -> bool:
        """False: a message is missing, and only a new subscription helps. What is older than what is known is ignored."""
        agent = self._agents.get(address)
        if agent is None or update.agent_epoch > agent.epoch:
            if not update.is_full:
                return False
            self._forget(address)
            agent = self._agents[address] = _Agent(Source(address, now), epoch=update.agent_epoch)
        elif update.agent_epoch < agent.epoch:
            return True
        elif not update.is_full and update.version != agent.version + 1:
            return update.version <= agent.version
        agent.source.heard_at = now
        agent.version = update.version
        touched: set[NamespacedName] = set()
        self._apply_instances(agent, update, touched)
        self._apply_sessions(agent, update, touched)
        agent.demand.update((d.model, d) for d in update.demand)
        self.leases.sweep(now)
        self._on_change(touched)
        return True

    def drop(self, address: str) -> None:
        """No declared instance is reported by this agent any more."""
        if address in self._agents:
            self._on_change(self._forget(address))

    # Inside.

    def _forget(self, address: str) -> set[NamespacedName]:
        agent = self._agents.pop(address, None)
        touched: set[NamespacedName] = set()
        if agent is not None:
            for name in list(agent.instances):
                self._remove_instance(agent, name, touched)
        return touched

    def _apply_instances(self, agent: _Agent, update: AgentUpdate, touched: set[NamespacedName]) -> None:
        gone = set(update.removed_instances)
        if update.is_full:
            gone |= agent.instances.keys() - {i.name for i in update.instances}
        for name in gone:
            self._remove_instance(agent, name, touched)
        for instance in update.instances:
            old = agent.instances.get(instance.name)
            agent.instances[instance.name] = instance
            models = {engine.model for engine in instance.engines}
            for engine in old.engines if old is not None else ():
                if engine.model not in models:
                    self._remove_engine(agent, (instance.name, engine.model))
                    touched.add(engine.model)
            for engine in instance.engines:
                self._put_engine(agent, engine)
                touched.add(engine.model)

    def _put_engine(self, agent: _Agent, engine: EngineView) -> None:
        place = (engine.instance, engine.model)
        known = self._candidates.get(place)
        if known is None:
            candidate = self._candidates[place] = Candidate(engine, Load(), agent.source)
            self._by_model.setdefault(engine.model, []).append(candidate)
            self._unload(place, candidate)
            return
        if known.source is not agent.source:
            self._void(place)  # the instance moved to another agent
            known.source = agent.source
        elif known.engine.epoch != engine.epoch:
            self._void(place, engine)
        known.engine = engine
        self._loads[place].advance()

    def _void(self, place: Place, successor: EngineView | None = None) -> None:
        """All that was known about an engine run goes with it: sessions, leases, load."""
        for key, places in list(self._sessions.items()):
            if place in places:
                self._forget_session(key, place)
        self.leases.void(place, but_epoch=successor.epoch if successor is not None else None)
        self._unload(place, self._candidates[place])

    def _unload(self, place: Place, candidate: Candidate) -> None:
        """A new engine run begins with what is leased on it. Tickets of the run before stay with its load."""
        load = self._loads[place] = EngineLoad(candidate.recount)
        load.n_leased = self.leases.units(place)
        candidate.load = load
        candidate.recount()

    def _remove_instance(self, agent: _Agent, name: NamespacedName, touched: set[NamespacedName]) -> None:
        instance = agent.instances.pop(name, None)
        for engine in instance.engines if instance is not None else ():
            self._remove_engine(agent, (name, engine.model))
            touched.add(engine.model)

    def _remove_engine(self, agent: _Agent, place: Place) -> None:
        candidate = self._candidates.get(place)
        if candidate is None or candidate.source is not agent.source:
            return
        self._void(place)
        del self._candidates[place], self._loads[place]
        of_model = self._by_model[place[1]]
        of_model.remove(candidate)
        if not of_model:
            del self._by_model[place[1]]

    def _apply_sessions(self, agent: _Agent, update: AgentUpdate, touched: set[NamespacedName]) -> None:
        if update.is_full:
            told = {view.session for view in update.sessions}
            for key in agent.sessions.keys() - told:
                self._forget_told(agent, key)
        for key in update.forgotten_sessions:
            self._forget_told(agent, key)
        for view in update.sessions:
            place = (view.instance, view.model)
            candidate = self._candidates.get(place)
            if candidate is not None and view.epoch == NO_EPOCH:
                view = view._replace(epoch=candidate.engine.epoch)
            if candidate is None or candidate.engine.epoch != view.epoch:
                continue  # of a run that is over, or of an instance that is not declared
            places = self._sessions.get(view.session)
            if places is None or place not in places:
                self._sessions.setdefault(view.session, {})
                agent.sessions.setdefault(view.session, set()).add(place)
            self._sessions[view.session][place] = view
            self.leases.observe(view.session, view.model, view.instance, view.lease)
            touched.add(view.model)

    def _forget_told(self, agent: _Agent, key: SessionKey) -> None:
        for place in list(agent.sessions.get(key, ())):
            self.leases.observe(key, place[1], place[0], None)
            self._forget_session(key, place)

    def _forget_session(self, key: SessionKey, place: Place) -> None:
        places = self._sessions.get(key, {})
        places.pop(place, None)
        if not places:
            self._sessions.pop(key, None)
        for agent in self._agents.values():
            told = agent.sessions.get(key)
            if told is not None:
                told.discard(place)
                if not told:
                    del agent.sessions[key]

    def _set_units(self, place: Place, n_units: int) -> None:
        load = self._loads.get(place)
        if load is not None:
            load.n_leased = n_units

    def check_integrity(self) -> None:
        """The indexes agree with what the agents told, and nothing is known of an engine run that is over."""
        indexed = [c for of_model in self._by_model.values() for c in of_model]
        if len(indexed) != len(self._candidates) or any(c is not self._candidates[c.engine.instance, c.engine.model] for c in indexed):
            raise AssertionError("the index by model and the candidates differ")
        told = {(i.name, e.model) for agent in self._agents.values() for i in agent.instances.values() for e in i.engines}
        if told != self._candidates.keys() or told != self._loads.keys():
            raise AssertionError(f"told {told}, known {set(self._candidates)}")
        for key, places in self._sessions.items():
            for place, view in places.items():
                if view.session != key or self._candidates[place].engine.epoch != view.epoch:
                    raise AssertionError(f"session {key} is known on an engine run that is over")
        if {(k, p) for k, ps in self._sessions.items() for p in ps} != {
            (k, p) for agent in self._agents.values() for k, ps in agent.sessions.items() for p in ps
        }:
            raise AssertionError("sessions are known that no agent told, or the reverse")
        for place, load in self._loads.items():
            load.check_integrity()
            counted = (self._candidates[place].ready_seconds, self._candidates[place].step_seconds)
            self._candidates[place].recount()
            if counted != (self._candidates[place].ready_seconds, self._candidates[place].step_seconds):
                raise AssertionError(f"{place} was not recounted after its last change")
            if load.n_leased != self.leases.units(place) or self._candidates[place].load is not load:
                raise AssertionError(f"{place} holds {load.n_leased} units, the leases say {self.leases.units(place)}")
        self.leases.check_integrity()
