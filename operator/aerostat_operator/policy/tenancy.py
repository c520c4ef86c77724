"""One pool: its models as wishes, their placement, and the specs of the pool's instances that follow."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aerostat_core.ids import InstanceName, ModelName, NamespacedName, PoolName, Seconds
from aerostat_core.specs import EngineState, InstanceModel, InstanceSpec, Model, Pool, SloTargets
from aerostat_operator.policy.demand import claim_of, wanted_replicas
from aerostat_operator.policy.eligibility import Verdict
from aerostat_operator.policy.kvpr import Rules, Seat
from aerostat_operator.policy.membership import Member, Membership
from aerostat_operator.policy.placement import Held, Move, Placements, Wish, place
from aerostat_operator.policy.world import Figures, InstanceView, Learned

# States in which a replica that may sleep can take over: its agent knows of it and can wake it.
WAKEABLE = frozenset({EngineState.ABSENT, EngineState.PARKED, EngineState.CLOSED, EngineState.OPEN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A model that the pool runs. `entry` is what its instances are told.

    `model` None: it goes on as its instances were told before (its edit is refused, its object unreadable, or it leaves).
    """

    entry: InstanceModel
    model: Model | None = None
    generation: int = 0
    objective: float = 0.0
    created_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    specs: tuple[InstanceSpec, ...]
    placements: Placements = field(default_factory=lambda: Placements(seats={}, missing={}))
    wanted: Mapping[ModelName, int] = field(default_factory=dict)


def tenants_of(
    membership: Membership,
    verdicts: Iterable[Verdict],
    unreadable: Iterable[NamespacedName],
    views: Sequence[InstanceView],
    served_at_home: frozenset[NamespacedName],
) -> list[Tenant]:
    """Models that belong here, and those that go on here for now: after a bad edit, or until their new pool serves them."""
    pool, tenants = membership.pool, []
    for verdict in (v for v in verdicts if v.model.name.namespace == pool.name.namespace):
        model, refusal = verdict.model, verdict.refusal
        before = _entry_before(views, ModelName(model.name.name))
        at_home = verdict.pool is not None and verdict.pool.name == pool.name
        if at_home and refusal is None:
            entry = _entry_of(model, verdict.targets, membership, before)
            generation, created_at = model.generation, model.created_at
            tenants.append(Tenant(entry=entry, model=model, generation=generation, objective=verdict.objective, created_at=created_at))
        elif before is not None and (refusal.keeps_running if refusal is not None else model.name not in served_at_home):
            tenants.append(Tenant(entry=before, generation=model.generation, created_at=model.created_at))
    unread = [_entry_before(views, ModelName(n.name)) for n in sorted(unreadable) if n.namespace == pool.name.namespace]
    return [*tenants, *(Tenant(entry=before) for before in unread if before is not None)]


def plan_pool(membership: Membership, tenants: Sequence[Tenant], views: Sequence[InstanceView], learned: Learned, now: Seconds) -> PoolPlan:
    """`views` are the pool's own instances."""
    pool = membership.pool
    moves = learned.moves.get(pool.name, ())
    generations = {t.entry.name: t.generation for t in tenants}
    failed = {
        (ModelName(name.name), instance)
        for name, generation, instance in learned.failed_moves
        if name.namespace == pool.name.namespace and generations.get(ModelName(name.name)) == generation
    }
    present = [v for v in views if v.spec.name in {m.name for m in membership.members}]
    accepting = frozenset(m.instance for m in membership.accepting)
    wishes = [_wish(t, pool, present, accepting, learned.figures, moves, now) for t in tenants]
    seats = [
        Seat(instance=m.instance, node=m.node, capacity_bytes=m.device_bytes, accepting=m.instance in accepting) for m in membership.members
    ]
    placements = place(seats, wishes, _rules(pool), moves=moves, failed_moves=frozenset(failed))
    entries = {t.entry.name: t.entry for t in tenants}
    specs = tuple(_spec(pool, member, entries, placements, present) for member in membership.members)
    return PoolPlan(specs=specs, placements=placements, wanted={w.model: w.replicas for w in wishes})


def plan_frozen_pool(views: Sequence[InstanceView], gone: frozenset[ModelName]) -> PoolPlan:
    """A pool whose object asks for what cannot be run, or cannot be read: its instances stay, less the models that are gone."""
    specs = [replace(v.spec, models=tuple(m for m in v.spec.models if m.name not in gone)) for v in views]
    return PoolPlan(specs=tuple(specs))


def _rules(pool: Pool) -> Rules:
    return Rules(
        sharing=pool.sharing,
        mode=pool.mode,
        demand=pool.placement.demand,
        host_bytes=pool.host_pool_bytes,
        hysteresis=pool.placement.hysteresis,
        max_moves=pool.placement.max_moves_per_cycle,
    )


def _wish(
    tenant: Tenant,
    pool: Pool,
    views: Sequence[InstanceView],
    accepting: frozenset[InstanceName],
    figures: Mapping[tuple[NamespacedName, str], Figures],
    moves: Sequence[Move],
    now: Seconds,
) -> Wish:
    entry, model = tenant.entry, tenant.model
    held = [v for v in views if v.entry(entry.name) is not None]
    serving = [v for v in held if InstanceName(v.spec.name.name) in accepting]
    reports = [r for v in serving if (r := v.report(entry.name)) is not None]
    n_now = len(serving) - sum(m.model == entry.name for m in moves)
    replicas = max(n_now, 1)
    if model is not None:
        replicas = wanted_replicas(
            min_replicas=model.min_replicas,
            max_replicas=model.max_replicas,
            objective=tenant.objective,
            reports=reports,
            n_now=n_now,
        )
    known = figures.get((pool.name.sibling(entry.name), entry.source_uri), Figures())
    return Wish(
        claim=claim_of(entry, pool, known, reports, replicas),
        replicas=replicas,
        entitled=max(model.min_replicas, 1) if model is not None else replicas,
        created_at=tenant.created_at,
        held=tuple(_held(entry, held, view, now) for view in held),
    )


def _held(entry: InstanceModel, all_held: Sequence[InstanceView], view: InstanceView, now: Seconds) -> Held:
    """Ready means open; of a model that may sleep, and sleeps everywhere, an agent that can wake it is enough."""
    state, heard = view.state_of(entry.name), view.is_heard(now)
    ready = state is EngineState.OPEN
    if not entry.resident and not any(v.state_of(entry.name) is EngineState.OPEN for v in all_held):
        ready = view.report(entry.name) is not None and state in WAKEABLE
    return Held(instance=InstanceName(view.spec.name.name), ready=ready and heard, failed=state is EngineState.FAILED)


def is_ready_on(view: InstanceView, model: ModelName, now: Seconds) -> bool:
    entry = view.entry(model)
    return entry is not None and _held(entry, [view], view, now).ready


def _entry_before(views: Sequence[InstanceView], model: ModelName) -> InstanceModel | None:
    entries = [entry for v in views if (entry := v.entry(model)) is not None]
    return max(entries, key=lambda e: e.generation, default=None)


def _entry_of(model: Model, targets: SloTargets, membership: Membership, before: InstanceModel | None) -> InstanceModel:
    """What an agent is told of a model. Sizes are of a whole replica, as the Model says them.

    The generation is that of the last change that an engine must start again for: a change of replicas or of the SLO
    must not restart engines.
    """
    tp = membership.pool.devices_per_instance
    device_bytes = max((m.device_bytes for m in membership.members), default=0)
    entry = InstanceModel(
        name=ModelName(model.name.name),
        generation=model.generation,
        source_uri=model.source_uri,
        secret=model.secret,
        served_name=model.served_name,
        engine_args=dict(sorted(model.engine_args.items())),
        context_tokens=model.context_tokens,
        trust_remote_code=model.trust_remote_code,
        resident=model.min_replicas > 0,
        residency_floor=model.residency_floor,
        weights_bytes=model.weights_bytes,
        kv_floor_bytes=model.kv_min_bytes,
        kv_ceiling_bytes=model.kv_max_bytes or max(device_bytes * tp, model.kv_min_bytes),
        slo=targets,
    )
    if before is not None and _engine_part(before) == _engine_part(entry):
        return replace(entry, generation=before.generation)
    return entry


def _engine_part(entry: InstanceModel) -> tuple[object, ...]:
    args = tuple(sorted(entry.engine_args.items()))
    identity = (entry.source_uri, entry.secret, entry.served_name, args, entry.context_tokens, entry.trust_remote_code)
    return (*identity, entry.kv_floor_bytes)


def _spec(
    pool: Pool,
    member: Member,
    entries: Mapping[ModelName, InstanceModel],
    placements: Placements,
    views: Sequence[InstanceView],
) -> InstanceSpec:
    models = [
        _moving(entries[name], member, placements, views) for name, seats in sorted(placements.seats.items()) if member.instance in seats
    ]
    return InstanceSpec(
        name=member.name,
        pool=PoolName(pool.name.name),
        node=member.node,
        device_kind=pool.devices.kind,
        devices=member.devices,
        device_bytes=member.device_bytes,
        reserve_bytes=pool.devices.reserve_bytes,
        sharing=pool.sharing,
        models=tuple(models),
        host_pool_bytes=pool.host_pool_bytes,
        idle_time=pool.idle_time,
        lease_ttl=pool.routing.lease_ttl,
        memory_price=pool.routing.memory_price,
        draining=member.cordoned,
    )


def _moving(entry: InstanceModel, member: Member, placements: Placements, views: Sequence[InstanceView]) -> InstanceModel:
    """A model that may sleep, but is awake at the source of its move, is opened at the target before the source goes."""
    awake = {v.spec.name.name for v in views if v.state_of(entry.name) is EngineState.OPEN}
    opens = any(m.model == entry.name and m.target == member.instance and m.source in awake for m in placements.moves)
    return replace(entry, resident=True) if opens else entry
