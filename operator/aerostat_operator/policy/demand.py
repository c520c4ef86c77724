"""How many replicas a model wants, and what each of them asks of a device: from declarations where nobody measured yet."""

from collections.abc import Sequence

from aerostat_core.specs import DemandDefinition, EngineState, InstanceModel, InstanceModelStatus, Pool, Sharing
from aerostat_operator.policy.kvpr import Claim, request_rate_demand, token_rate_demand
from aerostat_operator.policy.world import Figures


def wanted_replicas(*, min_replicas: int, max_replicas: int, objective: float, reports: Sequence[InstanceModelStatus], n_now: int) -> int:
    """At least the minimum (and one place where a call can wake it), one more while the objective is missed, back when idle.

    One more only once all present ones are open, so that a slow start is not answered by further starts. Back to the
    minimum only when the last minute had no call at all: fewer replicas at some load are never known to suffice.
    """
    least = max(min_replicas, 1)
    present = min(max(n_now, least), max(max_replicas, least))
    rates = [r.requests_per_second for r in reports if r.requests_per_second is not None]
    if reports and len(rates) == len(reports) and not any(rates):
        return least
    attained = [(r.attainment, r.requests_per_second or 0.0) for r in reports if r.attainment is not None]
    calls = sum(rate for _, rate in attained)
    share = sum(a * rate for a, rate in attained) / calls if calls > 0 else 1.0
    all_open = len(reports) >= present and all(r.state is EngineState.OPEN for r in reports)
    return min(present + 1, max_replicas) if all_open and share < objective and present < max_replicas else present


def claim_of(entry: InstanceModel, pool: Pool, figures: Figures, reports: Sequence[InstanceModelStatus], replicas: int) -> Claim:
    """Per device. Weights that nobody declared or measured count as 0: placed in good hope, looked at again when they are known.

    Of a declared and a measured size the larger counts, since the agent refuses what does not fit. KV floors are bytes of
    the whole replica, whatever their layout, so they divide by the devices.
    """
    tp = pool.devices_per_instance
    weights = max(entry.weights_bytes or 0, figures.weights_bytes)
    tokens = sum(r.tokens_per_second or 0.0 for r in reports) / max(replicas, 1)
    calls = sum(r.requests_per_second or 0.0 for r in reports) / max(replicas, 1)
    if pool.placement.demand is DemandDefinition.REQUEST_RATE:
        demand = request_rate_demand(calls_per_second=calls, ttft=entry.slo.ttft, tensor_parallel=tp)
    else:
        per_token = figures.kv_bytes_per_token
        demand = token_rate_demand(tokens_per_second=tokens, kv_bytes_per_token=per_token, tpot=entry.slo.tpot)
    return Claim(
        model=entry.name,
        demand=demand,
        weights_bytes=-(-weights // tp),
        kv_floor_bytes=-(-entry.kv_floor_bytes // tp),
        reserve_bytes=pool.devices.reserve_bytes if figures.reserve_bytes is None else figures.reserve_bytes,
        master_bytes=weights if pool.sharing is Sharing.ROUNDS else 0,
    )
