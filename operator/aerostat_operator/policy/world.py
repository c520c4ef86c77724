"""What a plan is made from: all objects as frozen values, and what earlier plans learned. Reading them is `reading`'s job."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from aerostat_core.defaults import STATUS_FIGURES_EVERY
from aerostat_core.ids import Bytes, InstanceName, ModelName, NamespacedName, Seconds
from aerostat_core.specs import (
    Condition,
    EngineState,
    InstanceModel,
    InstanceModelStatus,
    InstanceSpec,
    InstanceStatus,
    Model,
    Node,
    Pool,
    Slo,
)
from aerostat_operator.policy.placement import Move
from aerostat_operator.policy.statuses import parse_time

AGENT_SILENT_AFTER: Seconds = 3 * STATUS_FIGURES_EVERY


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """An Instance that exists: what it was told last, and what its agent says."""

    spec: InstanceSpec
    status: InstanceStatus

    def entry(self, model: ModelName) -> InstanceModel | None:
        return next((m for m in self.spec.models if m.name == model), None)

    def report(self, model: ModelName) -> InstanceModelStatus | None:
        return next((m for m in self.status.models if m.name == model), None)

    def is_heard(self, now: Seconds) -> bool:
        """Its agent wrote not long ago."""
        return bool(self.status.heartbeat) and now - parse_time(self.status.heartbeat) <= AGENT_SILENT_AFTER

    def state_of(self, model: ModelName) -> EngineState:
        report = self.report(model)
        return report.state if report is not None else EngineState.ABSENT


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """`unreadable`: objects that could not be read, and why; what hangs on them stays as it is.

    `conditions` are those that the last run wrote, by kind ("Model", "Pool", "SLO") and name.
    """

    models: tuple[Model, ...] = ()
    pools: tuple[Pool, ...] = ()
    slos: tuple[Slo, ...] = ()
    nodes: tuple[Node, ...] = ()
    instances: tuple[InstanceView, ...] = ()
    unreadable: Mapping[tuple[str, NamespacedName], str] = field(default_factory=dict)
    conditions: Mapping[tuple[str, NamespacedName], tuple[Condition, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What agents measured of one model and source: bytes of a whole replica, per device, and per token and device."""

    weights_bytes: Bytes = 0
    reserve_bytes: Bytes | None = None
    kv_bytes_per_token: Bytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What plans hand on. Losing it (a restart) costs at most a placement tried once more, never a wrong one.

    `figures` outlives the replica that was measured; `moves` says which end of a move is the source; `failed_moves`
    (with the model's generation) are not tried again.
    """

    figures: Mapping[tuple[NamespacedName, str], Figures] = field(default_factory=dict)
    moves: Mapping[NamespacedName, tuple[Move, ...]] = field(default_factory=dict)
    failed_moves: frozenset[tuple[NamespacedName, int, InstanceName]] = frozenset()


def learn_figures(world: World, figures: Mapping[tuple[NamespacedName, str], Figures]) -> dict[tuple[NamespacedName, str], Figures]:
    """The known figures with what the agents report now. Replicas differ little; the larger one counts."""
    learned: dict[tuple[NamespacedName, str], Figures] = {}
    for view in world.instances:
        for entry in view.spec.models:
            report = view.report(entry.name)
            if report is None or report.generation != entry.generation:
                continue
            key = (view.spec.name.sibling(entry.name), entry.source_uri)
            known = learned.get(key, Figures())
            reserves = [b for b in (known.reserve_bytes, report.reserve_bytes) if b is not None]
            learned[key] = Figures(
                weights_bytes=max(known.weights_bytes, report.weights_bytes or 0),
                reserve_bytes=max(reserves, default=None),
                kv_bytes_per_token=max(known.kv_bytes_per_token, report.kv_bytes_per_token or 0),
            )
    alive = {(m.name, m.source_uri) for m in world.models} | set(learned)
    merged = {key: f for key, f in figures.items() if key in alive}
    for key, new in learned.items():
        old = merged.get(key, Figures())
        merged[key] = Figures(
            weights_bytes=new.weights_bytes or old.weights_bytes,
            reserve_bytes=new.reserve_bytes if new.reserve_bytes is not None else old.reserve_bytes,
            kv_bytes_per_token=new.kv_bytes_per_token or old.kv_bytes_per_token,
        )
    return merged
