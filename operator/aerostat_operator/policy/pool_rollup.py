"""Status of a Pool from its members, and of an SLO from the models that name it."""

from collections.abc import Sequence

from aerostat_core.ids import InstanceName, Seconds
from aerostat_core.specs import Condition, Sharing, Slo
from aerostat_operator.policy.eligibility import SHARING_NOT_SUPPORTED
from aerostat_operator.policy.membership import Membership
from aerostat_operator.policy.statuses import PoolStatus, SloStatus, carried_on, condition
from aerostat_operator.policy.world import InstanceView


def roll_up_pool(
    membership: Membership, views: Sequence[InstanceView], *, n_models: int, previous: Sequence[Condition], now: Seconds
) -> PoolStatus:
    """`views` are the pool's own instances."""
    pool = membership.pool
    heard = {v.spec.name for v in views if v.is_heard(now)}
    n_ready = sum(m.name in heard for m in membership.accepting)
    conditions = [_ready(membership, n_ready, [m.instance for m in membership.accepting if m.name not in heard])]
    if membership.conflicts:
        named = "; ".join(f"{node} belongs to the older Pool {owner}" for node, owner in membership.conflicts)
        conditions.append(condition("Conflict", True, "NodeTaken", f"{named}: make spec.nodeSelector of the two differ"))
    return PoolStatus(
        name=pool.name,
        generation=pool.generation,
        conditions=carried_on(conditions, previous, generation=pool.generation, now=now),
        nodes=len(membership.nodes),
        instances=f"{n_ready}/{len(membership.members)}",
        models=n_models,
    )


def _ready(membership: Membership, n_ready: int, silent: Sequence[InstanceName]) -> Condition:
    pool, size = membership.pool, membership.pool.devices_per_instance
    if pool.sharing is Sharing.ROUNDS:
        return condition("Ready", False, "SharingNotSupported", SHARING_NOT_SUPPORTED)
    if not membership.nodes:
        if membership.conflicts:
            return condition("Ready", False, "Conflict", "older Pools have all nodes that spec.nodeSelector matches")
        labels = ",".join(f"{key}={value}" for key, value in sorted(pool.node_selector.items()))
        why = f"no node has the labels of spec.nodeSelector ({labels})" if labels else "there is no node"
        return condition("Ready", False, "NoNodes", why)
    if not membership.members:
        message = f"no node has {size} devices of kind {pool.devices.kind.value}, which devicesPerInstance asks for"
        return condition("Ready", False, "NoDevices", message)
    notes = [f"{n} devices of {node} are left over, since {size} make an instance" for node, n in membership.leftover]
    notes += [f"{node} has no devices" for node in membership.bare]
    if silent:
        notes.append(f"nothing is heard from the agents of {', '.join(silent)}")
    away = sorted(m.instance for m in membership.members if m.cordoned or m.lost)
    notes += [f"the node of {i} is cordoned or not ready" for i in away]
    message = "; ".join([f"{n_ready} of {len(membership.members)} instances accept models", *notes])
    if silent:
        return condition("Ready", False, "AgentSilent", message)
    if n_ready == 0:
        return condition("Ready", False, "NodesNotReady", message)
    return condition("Ready", True, "Ready", message)


def roll_up_slo(slo: Slo, *, n_models: int, previous: Sequence[Condition], now: Seconds) -> SloStatus:
    ready = condition("Ready", True, "InForce", f"Models that owe it: {n_models}")
    conditions = carried_on([ready], previous, generation=slo.generation, now=now)
    return SloStatus(name=slo.name, generation=slo.generation, conditions=conditions, models=n_models)
