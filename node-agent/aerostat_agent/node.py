"""All that this agent knows of its node now, in one place, in one event loop.

The supervisor writes tracks and verdicts, the telemetry service leases and demand; snapshot and status read. What happens to
several of them together (an engine ended) happens here.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from aerostat_agent.engine_events import Boundary, Hello
from aerostat_agent.notes import EngineNote
from aerostat_agent.policy.demand import DemandTable
from aerostat_agent.policy.engines import Verdict, fingerprint
from aerostat_agent.policy.figures import Figures
from aerostat_agent.policy.leases import Installed, Lease, LeaseTable
from aerostat_agent.policy.memory import ContainerMemory, refuse_node
from aerostat_agent.policy.sessions import Row, SessionTable
from aerostat_agent.policy.settlements import Settlements
from aerostat_agent.policy.tracks import EngineKey, Phase, Track
from aerostat_core.clock import Clock
from aerostat_core.ids import Bytes, Epoch, LeaseId, NamespacedName, NodeName, Seconds, SessionKey
from aerostat_core.specs import EngineState, InstanceSpec, SloTargets

MAX_TRANSITIONS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """What is said of a model changed."""

    key: EngineKey
    before: Verdict | None
    after: Verdict


@dataclass(slots=True, kw_only=True)
class LiveEngine:
    """An engine process, by what it said. `hellos` by rank; `link_lost_at` of any rank, None while all are connected."""

    epoch: Epoch
    note: EngineNote
    log_path: Path
    started_at: Seconds
    hellos: dict[int, Hello] = field(default_factory=dict)
    linked: set[int] = field(default_factory=set)
    link_lost_at: Seconds | None = None
    boundary: Boundary = field(default_factory=Boundary)
    probing: "asyncio.Task[None] | None" = None

    @property
    def hello(self) -> Hello | None:
        """What rank 0 said: the figures of the whole engine."""
        return self.hellos.get(0)

    @property
    def has_all_ranks(self) -> bool:
        return self.hello is not None and self.linked >= set(range(self.hello.tensor_parallel))


class Node:
    """Mutable. `touch` after a change that routers or people should learn of."""

    def __init__(self, name: NodeName, agent_epoch: Epoch, clock: Clock, *, memory: ContainerMemory) -> None:
        self.name = name
        self.memory = memory
        self.agent_epoch = agent_epoch
        self.clock = clock
        self.specs: dict[NamespacedName, InstanceSpec] = {}
        self.tracks: dict[EngineKey, Track] = {}
        self.engines: dict[EngineKey, LiveEngine] = {}
        self.figures: dict[EngineKey, Figures] = {}
        self.verdicts: dict[EngineKey, Verdict] = {}
        self.transitions: deque[Transition] = deque(maxlen=MAX_TRANSITIONS)  # for whoever notes them
        self.settlements = Settlements()
        self.woken: set[EngineKey] = set()
        self.deleted: set[NamespacedName] = set()  # instances that go with their last engine
        self.withdrawn: set[NamespacedName] = set()  # for whoever writes statuses: the next Instance of that name has none
        self.lease_counts: Counter[str] = Counter()
        self.sessions = SessionTable()
        self.leases = LeaseTable()
        self.demand = DemandTable()
        self._watchers: list[asyncio.Event] = []

    def watch(self) -> asyncio.Event:
        """An event that each change sets; whoever waits for it clears it."""
        event = asyncio.Event()
        self._watchers.append(event)
        return event

    def touch(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    def declare(self, spec: InstanceSpec) -> None:
        """The operator's will about an instance of this node. What a router woke is wanted until the model's own spec changes."""
        before = self.specs.get(spec.name)
        old = {m.name: fingerprint(before, m) for m in before.models} if before is not None else {}
        new = {m.name: fingerprint(spec, m) for m in spec.models}
        for key in [key for key in self.woken if key.instance == spec.name]:
            if key.model not in new or old.get(key.model, new[key.model]) != new[key.model]:
                self.woken.discard(key)
        self.specs[spec.name] = spec
        self.deleted.discard(spec.name)
        self.touch()

    def withdraw(self, name: NamespacedName) -> None:
        """The instance was deleted, or is of another node: its engines drain, then it is forgotten."""
        if (spec := self.specs.get(name)) is not None:
            self.specs[name] = replace(spec, draining=True, models=())
            self.deleted.add(name)
            self.withdrawn.add(name)
            self.woken = {key for key in self.woken if key.instance != name}
            self.touch()

    def judge(self, verdicts: Mapping[EngineKey, Verdict]) -> None:
        """The plan's words about each model."""
        if verdicts == self.verdicts:
            return
        for key, verdict in verdicts.items():
            if (before := self.verdicts.get(key)) != verdict:
                self.transitions.append(Transition(key=key, before=before, after=verdict))
        self.verdicts = dict(verdicts)
        self.touch()

    def figures_of(self, key: EngineKey) -> Figures:
        return self.figures.setdefault(key, Figures())

    def slo_of(self, key: EngineKey) -> SloTargets | None:
        """None for a model that the spec has no more."""
        spec = self.specs.get(key.instance)
        return next((m.slo for m in spec.models if m.name == key.model), None) if spec is not None else None

    def capacity(self, instance: NamespacedName) -> Bytes:
        spec = self.specs[instance]
        return spec.device_bytes * spec.tensor_parallel

    def why_too_small(self) -> str | None:
        """None: what is declared on this node fits into what its engines may use."""
        return refuse_node(self.specs.values(), self.memory)

    def used(self, instance: NamespacedName) -> Bytes:
        return sum(t.footprint.total for t in self.tracks.values() if t.key.instance == instance and t.footprint is not None)

    def engine_ended(self, key: EngineKey) -> None:
        """Its process is gone: nothing that was known of its memory holds any more."""
        engine = self.engines.pop(key, None)
        if engine is not None and engine.probing is not None:
            engine.probing.cancel()
        self.void_leases(key)
        self.sessions.engine_ended(key)
        if key in self.verdicts:  # routers must not wait for the next plan to learn it
            self.judge({**self.verdicts, key: Verdict(state=EngineState.ABSENT, reason="EngineEnded")})
        self.touch()

    def void_leases(self, key: EngineKey) -> None:
        self._tell(self.leases.void(key), "void")

    def install_lease(self, lease: Lease) -> Installed:
        """Raises nothing: a refusal is an answer."""
        engine, track = self.engines.get(lease.engine), self.tracks.get(lease.engine)
        if engine is None or engine.hello is None or track is None or track.phase is not Phase.OPEN:
            return Installed(lease=None, reason="EngineChanged")
        installed = self.leases.install(lease, now=self.clock.wall(), current_epoch=engine.epoch, limit=engine.hello.max_running)
        if installed.lease is lease:  # not the same one told again
            self.sessions.leased(Row(lease.engine, lease.session))
            self._tell((lease,), "installed")
        return installed

    def consume_lease(self, lease_id: LeaseId, session: SessionKey) -> bool:
        lease = self.leases.consume(lease_id, session, now=self.clock.wall())
        if lease is not None:
            self._tell((lease,), "consumed")
        return lease is not None

    def expire_leases(self) -> None:
        self._tell(self.leases.expire(self.clock.wall()), "expired")

    def _tell(self, leases: tuple[Lease, ...], outcome: str) -> None:
        self.lease_counts[outcome] += len(leases)
        for lease in leases:
            self.sessions.lease_changed(Row(lease.engine, lease.session))
        if leases:
            self.touch()
