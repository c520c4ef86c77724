"""The whole plan: from all objects to what every Instance shall be and every status shall say. Pure, and idempotent:
planned again from its own outcome, it changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aerostat_core.ids import InstanceName, ModelName, NamespacedName, PoolName, Seconds
from aerostat_core.specs import InstanceSpec, Sharing
from aerostat_operator.policy.eligibility import Verdict, judge
from aerostat_operator.policy.membership import Membership, assign_members
from aerostat_operator.policy.placement import Missing
from aerostat_operator.policy.pool_rollup import roll_up_pool, roll_up_slo
from aerostat_operator.policy.rollup import ModelFacts, Replica, roll_up_model
from aerostat_operator.policy.statuses import InvalidStatus, ModelStatus, PoolStatus, SloStatus, carried_on, condition
from aerostat_operator.policy.tenancy import PoolPlan, is_ready_on, plan_frozen_pool, plan_pool, tenants_of
from aerostat_operator.policy.world import InstanceView, Learned, World, learn_figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`obsolete` Instances are deleted. `reasons`: one line for each change of placement, by pool. `pressures`: KVPR by Instance."""

    instances: tuple[InstanceSpec, ...]
    obsolete: tuple[NamespacedName, ...]
    models: tuple[ModelStatus, ...]
    pools: tuple[PoolStatus, ...]
    slos: tuple[SloStatus, ...]
    invalid: tuple[InvalidStatus, ...]
    learned: Learned
    reasons: Mapping[NamespacedName, tuple[str, ...]]
    pressures: Mapping[NamespacedName, float]


def plan(world: World, learned: Learned, *, now: Seconds, url: str) -> Plan:
    """`now` is wall time (heartbeats and transitions are), `url` where clients find the routers."""
    learned = replace(learned, figures=learn_figures(world, learned.figures))
    memberships = assign_members(world.pools, world.nodes)
    verdicts = judge(world.models, memberships, {s.name: s for s in world.slos}, world.unreadable)
    pools = _plan_pools(world, memberships, verdicts, learned, now)
    desired = {spec.name: spec for p in pools.values() for spec in p.specs}
    return Plan(
        instances=tuple(desired[name] for name in sorted(desired)),
        obsolete=tuple(sorted(v.spec.name for v in world.instances if v.spec.name not in desired)),
        models=tuple(_model_status(v, pools, world, memberships, now, url) for v in verdicts.values()),
        pools=tuple(_pool_status(m, pools[name], world, now) for name, m in memberships.items()),
        slos=_slo_statuses(world, now),
        invalid=_invalid_statuses(world, now),
        learned=_learned(learned, pools, verdicts),
        reasons={name: p.placements.reasons for name, p in pools.items() if p.placements.reasons},
        pressures={pool.sibling(i): pressure for pool, p in pools.items() for i, pressure in p.placements.pressure.items()},
    )


def _plan_pools(
    world: World,
    memberships: Mapping[NamespacedName, Membership],
    verdicts: Mapping[NamespacedName, Verdict],
    learned: Learned,
    now: Seconds,
) -> dict[NamespacedName, PoolPlan]:
    unreadable = [name for kind, name in world.unreadable if kind == "Model"]
    frozen = {name for kind, name in world.unreadable if kind == "Pool"}
    frozen |= {name for name, m in memberships.items() if m.pool.sharing is Sharing.ROUNDS}
    plans = {}
    for name in sorted({*memberships, *frozen}):
        views = _views_of(world, name)
        if name in frozen:
            known = {n.name for n in (*verdicts, *unreadable) if n.namespace == name.namespace}
            stopped = {n.name for n, v in verdicts.items() if v.refusal is not None and not v.refusal.keeps_running}
            gone = {m.name for v in views for m in v.spec.models if m.name not in known or m.name in stopped}
            plans[name] = plan_frozen_pool(views, frozenset(gone))
        else:
            served = frozenset(n for n, v in verdicts.items() if _is_served_at_home(world, v, now))
            tenants = tenants_of(memberships[name], verdicts.values(), unreadable, views, served)
            plans[name] = plan_pool(memberships[name], tenants, views, learned, now)
    return plans


def _is_served_at_home(world: World, verdict: Verdict, now: Seconds) -> bool:
    views = _views_of(world, verdict.pool.name) if verdict.pool is not None else []
    return any(is_ready_on(view, ModelName(verdict.model.name.name), now) for view in views)


def _views_of(world: World, pool: NamespacedName) -> list[InstanceView]:
    own = [v for v in world.instances if v.spec.name.sibling(v.spec.pool) == pool]
    return sorted(own, key=lambda v: v.spec.name)


def _model_status(
    verdict: Verdict,
    pools: Mapping[NamespacedName, PoolPlan],
    world: World,
    memberships: Mapping[NamespacedName, Membership],
    now: Seconds,
    url: str,
) -> ModelStatus:
    model, home = verdict.model, verdict.pool.name if verdict.pool is not None else None
    name = ModelName(model.name.name)
    own = [(pool, p) for pool, p in sorted(pools.items()) if pool.namespace == model.name.namespace]
    replicas = [r for _, p in own for r in _replicas(name, p.specs, world, memberships, now)]
    running_in = [pool for pool, p in own if any(m.name == name for spec in p.specs for m in spec.models)]
    at_home = pools[home] if home is not None else None
    facts = ModelFacts(
        model=model,
        pool=PoolName((home or running_in[0]).name) if home is not None or running_in else None,
        targets=verdict.targets if verdict.has_slo else None,
        refusal=verdict.refusal,
        missing=_missing(at_home, name) if verdict.refusal is None else None,
        replicas=tuple(replicas),
        wanted=max(model.min_replicas, at_home.wanted.get(name, 0) if at_home is not None else 0),
        n_moving=sum(m.model == name for _, p in own for m in p.placements.moves),
        url=url,
    )
    return roll_up_model(facts, previous=world.conditions.get(("Model", model.name), ()), now=now)


def _missing(pool: PoolPlan | None, model: ModelName) -> Missing | None:
    return pool.placements.missing.get(model) if pool is not None else None


def _replicas(
    model: ModelName,
    specs: Sequence[InstanceSpec],
    world: World,
    memberships: Mapping[NamespacedName, Membership],
    now: Seconds,
) -> list[Replica]:
    views = {v.spec.name: v for v in world.instances}
    members = {m.name: m for membership in memberships.values() for m in membership.members}
    replicas = []
    for spec in specs:
        entry = next((m for m in spec.models if m.name == model), None)
        if entry is None:
            continue
        view, member = views.get(spec.name), members.get(spec.name)
        report = view.report(model) if view is not None else None
        stands = member is None or not (member.cordoned or member.lost)
        replicas.append(
            Replica(
                instance=InstanceName(spec.name.name),
                node=spec.node,
                resident=entry.resident,
                report=report,
                live=view is not None and view.is_heard(now) and stands,
                current=report is not None and report.generation == entry.generation,
            )
        )
    return replicas


def _pool_status(membership: Membership, pool: PoolPlan, world: World, now: Seconds) -> PoolStatus:
    name = membership.pool.name
    n_models = len({m.name for spec in pool.specs for m in spec.models})
    previous = world.conditions.get(("Pool", name), ())
    return roll_up_pool(membership, _views_of(world, name), n_models=n_models, previous=previous, now=now)


def _slo_statuses(world: World, now: Seconds) -> tuple[SloStatus, ...]:
    statuses = []
    for slo in sorted(world.slos, key=lambda s: s.name):
        n_models = sum(m.slo == slo.name.name and m.name.namespace == slo.name.namespace for m in world.models)
        statuses.append(roll_up_slo(slo, n_models=n_models, previous=world.conditions.get(("SLO", slo.name), ()), now=now))
    return tuple(statuses)


def _invalid_statuses(world: World, now: Seconds) -> tuple[InvalidStatus, ...]:
    statuses = []
    for (kind, name), why in sorted(world.unreadable.items()):
        if kind in ("Model", "Pool", "SLO"):
            ready = condition("Ready", False, "Invalid", f"the object cannot be read, what runs of it stays as it is: {why}")
            conditions = carried_on([ready], world.conditions.get((kind, name), ()), generation=0, now=now)
            statuses.append(InvalidStatus(kind=kind, name=name, conditions=conditions))
    return tuple(statuses)


def _learned(learned: Learned, pools: Mapping[NamespacedName, PoolPlan], verdicts: Mapping[NamespacedName, Verdict]) -> Learned:
    failed = {
        (pool.sibling(model), verdicts[pool.sibling(model)].model.generation, instance)
        for pool, p in pools.items()
        for model, instance in p.placements.failed_moves
        if pool.sibling(model) in verdicts
    }
    moves = {name: p.placements.moves for name, p in pools.items() if p.placements.moves}
    return replace(learned, moves=moves, failed_moves=frozenset(failed))
