"""Status of a Model from what its replicas' agents report: the conditions, the child's reason and message carried up."""

from collections.abc import Sequence
from dataclasses import dataclass

from aerostat_core.ids import InstanceName, NodeName, PoolName, Seconds
from aerostat_core.quantities import format_duration
from aerostat_core.specs import Condition, EngineState, InstanceModelStatus, Model, Placement, SloTargets
from aerostat_operator.policy.eligibility import Refusal
from aerostat_operator.policy.placement import Missing
from aerostat_operator.policy.statuses import ModelStatus, carried_on, condition, find, seconds_in_status

STALLED_AFTER: Seconds = 300.0  # not Ready for this long is no start that merely takes its time
# From the state that says most about a model to the one that says least.
TELLING = (
    EngineState.OPEN,
    EngineState.STARTING,
    EngineState.CLOSED,
    EngineState.PARKED,
    EngineState.DRAINING,
    EngineState.FAILED,
    EngineState.ABSENT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """`live`: its agent is heard and its node takes traffic. `current`: it runs what the Model says now."""

    instance: InstanceName
    node: NodeName
    resident: bool
    report: InstanceModelStatus | None
    live: bool
    current: bool

    @property
    def state(self) -> EngineState:
        return self.report.state if self.report is not None else EngineState.ABSENT

    @property
    def serves(self) -> bool:
        return self.live and self.state is EngineState.OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """All that a Model's status follows from."""

    model: Model
    pool: PoolName | None
    targets: SloTargets | None
    refusal: Refusal | None = None
    missing: Missing | None = None
    replicas: tuple[Replica, ...] = ()
    wanted: int = 0
    n_moving: int = 0
    url: str = ""

    @property
    def sleeps(self) -> bool:
        """It may sleep, and does."""
        awake = {EngineState.OPEN, EngineState.STARTING, EngineState.DRAINING, EngineState.FAILED}
        resident = any(r.resident for r in self.replicas)
        return self.model.min_replicas == 0 and not resident and not any(r.state in awake for r in self.replicas)


def roll_up_model(facts: ModelFacts, *, previous: Sequence[Condition], now: Seconds) -> ModelStatus:
    scheduled, loaded, available = _scheduled(facts), _loaded(facts), _available(facts)
    ready = _ready(facts, [c for c in (scheduled, loaded, available) if c is not None])
    stalled = _stalled(facts, ready, find(previous, "Ready"), now)
    conditions = [c for c in (ready, scheduled, loaded, available, _progressing(facts), stalled) if c is not None]
    n_open = sum(r.serves for r in facts.replicas)
    waking = sum(r.state is EngineState.STARTING for r in facts.replicas)
    wanted = facts.wanted if facts.model.min_replicas else min(n_open + waking, facts.wanted)
    return ModelStatus(
        name=facts.model.name,
        generation=facts.model.generation,
        conditions=carried_on(conditions, previous, generation=facts.model.generation, now=now),
        url=facts.url,
        pool=facts.pool,
        state=min((r.state for r in facts.replicas if r.live), key=TELLING.index, default=EngineState.ABSENT),
        replicas=n_open,
        instances=f"{n_open}/{max(wanted, facts.model.min_replicas)}",
        ttft=_ttft(facts),
        placements=tuple(
            Placement(instance=r.instance, node=r.node, state=r.state) for r in sorted(facts.replicas, key=lambda r: r.instance)
        ),
    )


def _scheduled(facts: ModelFacts) -> Condition:
    if facts.refusal is not None:
        goes_on = "; what was accepted before keeps running" if facts.replicas else ""
        return condition("Scheduled", False, facts.refusal.reason, facts.refusal.message + goes_on)
    if facts.missing is not None and facts.missing.entitled:
        return condition("Scheduled", False, facts.missing.reason, facts.missing.message)
    places = "on " + ", ".join(sorted(r.instance for r in facts.replicas))
    more = f"; demand asks for more: {facts.missing.message}" if facts.missing is not None else ""
    return condition("Scheduled", True, "Placed", places + more)


def _loaded(facts: ModelFacts) -> Condition | None:
    """Absent where nothing needs to be loaded: a model that sleeps, or that is nowhere."""
    if not facts.replicas or facts.sleeps:
        return None
    needed = max(facts.model.min_replicas, 1)
    n_loaded = sum(r.current and r.state in (EngineState.OPEN, EngineState.CLOSED) for r in facts.replicas)
    if n_loaded >= needed:
        return condition("Loaded", True, "Loaded", f"the weights are there on {n_loaded} of {needed}")
    if (failed := _failed(facts)) is not None:
        return condition("Loaded", False, *failed)
    for r in facts.replicas:
        if r.report is not None and r.state is EngineState.STARTING:
            what = r.report.progress or r.report.message or "the engine is starting"
            return condition("Loaded", False, r.report.reason or "Starting", f"{r.instance}: {what}")
    for r in facts.replicas:
        if r.report is not None and r.state is EngineState.OPEN and not r.current:
            why = f": {r.report.message}" if r.report.message else ""
            reason = r.report.reason if why else "Updating"
            return condition("Loaded", False, reason, f"what is declared now does not run yet on {r.instance}{why}")
    draining = ", ".join(r.instance for r in facts.replicas if r.state is EngineState.DRAINING)
    if draining:
        return condition("Loaded", False, "Draining", f"its engine ends on {draining}")
    waits = ", ".join(r.instance for r in facts.replicas if r.state is not EngineState.OPEN)
    return condition("Loaded", False, "Pending", f"its agent has not started it yet on {waits}")


def _available(facts: ModelFacts) -> Condition:
    serving = [r.instance for r in facts.replicas if r.serves]
    if serving:
        return condition("Available", True, "Serving", "takes traffic on " + ", ".join(sorted(serving)))
    if not facts.replicas:
        return condition("Available", False, "NotScheduled", "no instance may run it")
    silent = sorted(r.instance for r in facts.replicas if not r.live)
    if len(silent) == len(facts.replicas):
        return condition(
            "Available", False, "AgentSilent", f"nothing is heard from {', '.join(silent)}, or its node is cordoned or not ready"
        )
    if facts.sleeps:
        return condition("Available", True, "ScaledToZero", "it sleeps; the first call wakes it")
    if (failed := _failed(facts)) is not None:
        return condition("Available", False, *failed)
    return condition("Available", False, "NotOpen", "no replica is open yet")


def _progressing(facts: ModelFacts) -> Condition:
    if facts.n_moving:
        return condition("Progressing", True, "Moving", "a replica moves; its source serves until its target is ready")
    for r in facts.replicas:
        if r.report is None and r.resident:
            return condition("Progressing", True, "Pending", f"{r.instance} waits for its agent to start it")
        if r.state in (EngineState.STARTING, EngineState.DRAINING):
            return condition("Progressing", True, r.state.value, f"{r.instance} is {r.state.value.lower()}")
        if not r.current and r.live and not facts.sleeps and r.state is not EngineState.FAILED:
            return condition("Progressing", True, "Updating", f"{r.instance} does not run yet what is declared now")
        if r.resident and r.live and r.state is not EngineState.OPEN and r.state is not EngineState.FAILED:
            return condition("Progressing", True, "Opening", f"{r.instance} is {r.state.value.lower()} and shall be open")
    return condition("Progressing", False, "Settled", "nothing is changing")


def _ready(facts: ModelFacts, parts: Sequence[Condition]) -> Condition:
    for part in parts:
        if part.status != "True":
            return condition("Ready", False, part.reason, part.message)
    if facts.sleeps:
        return condition("Ready", True, "ScaledToZero", "it sleeps; the first call wakes it")
    return condition("Ready", True, "Ready", parts[-1].message)


def _stalled(facts: ModelFacts, ready: Condition, before: Condition | None, now: Seconds) -> Condition | None:
    """Absent unless it is stuck: an engine gave up, or it has not been Ready for minutes."""
    if (failed := _failed(facts)) is not None:
        return condition("Stalled", True, *failed)
    waited = seconds_in_status(before, now)
    if ready.status == "False" and before is not None and before.status == "False" and waited >= STALLED_AFTER:
        return condition("Stalled", True, ready.reason, f"not ready for minutes: {ready.message}")
    return None


def _failed(facts: ModelFacts) -> tuple[str, str] | None:
    """Reason and message of the first replica that gave up, in its agent's own words."""
    for r in sorted(facts.replicas, key=lambda r: r.instance):
        if r.report is not None and r.state is EngineState.FAILED:
            return r.report.reason or "EngineFailed", f"{r.instance}: {r.report.message or 'the engine gave up'}"
    return None


def _ttft(facts: ModelFacts) -> str:
    """The worst replica's 95th percentile and the target; `-` where there is none."""
    measured = [r.report.ttft_p95 for r in facts.replicas if r.report is not None and r.report.ttft_p95 is not None]
    p95 = format_duration(max(measured)) if measured else "-"
    return f"{p95} / {format_duration(facts.targets.ttft)}" if facts.targets is not None else f"{p95} / -"
