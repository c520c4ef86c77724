"""From specs and statuses to the objects that the operator writes. The way back is `aerostat_core.resources`.

Deterministic: the same value gives the same object, so that what is there can be compared with what should be.
"""

from decimal import ROUND_HALF_EVEN, Decimal

from aerostat_core.ids import Bytes, Seconds
from aerostat_core.resources import API_VERSION, Resource, condition_resource, placement_resource
from aerostat_core.specs import Condition, InstanceModel, InstanceSpec
from aerostat_operator.policy.statuses import InvalidStatus, ModelStatus, PoolStatus, SloStatus

NANOSECOND = Decimal("0.000000001")  # durations of the API go no finer
UNITS = (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))


def instance_resource(spec: InstanceSpec, *, owner_uid: str) -> Resource:
    """The Instance, owned by its Pool: where a garbage collector runs, it goes when the Pool does."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": "Pool",
        "name": spec.pool,
        "uid": owner_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "Instance",
        "metadata": {
            "name": spec.name.name,
            "namespace": spec.name.namespace,
            "labels": instance_labels(spec),
            "ownerReferences": [owner],
        },
        "spec": instance_spec_resource(spec),
    }


def instance_labels(spec: InstanceSpec) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "aerostat",
        "app.kubernetes.io/instance": spec.name.name,
        "app.kubernetes.io/component": "instance",
        "app.kubernetes.io/part-of": "aerostat",
        "app.kubernetes.io/managed-by": "aerostat-operator",
        "aerostat.dev/pool": spec.pool,
    }


def instance_spec_resource(spec: InstanceSpec) -> Resource:
    return {
        "pool": spec.pool,
        "node": spec.node,
        "devices": {
            "kind": spec.device_kind.value,
            "indices": list(spec.devices),
            "memory": exact_size(spec.device_bytes),
            "reserve": exact_size(spec.reserve_bytes),
        },
        "sharing": spec.sharing.value,
        "models": [_instance_model_resource(m) for m in spec.models],
        "limits": {"hostPool": exact_size(spec.host_pool_bytes), "idleTime": exact_duration(spec.idle_time)},
        "routing": {
            "leaseTTL": exact_duration(spec.lease_ttl),
            "memoryPricePerGi": exact_duration(spec.memory_price * 2**30),
        },
        "draining": spec.draining,
    }


def _instance_model_resource(m: InstanceModel) -> Resource:
    source: Resource = {"uri": m.source_uri}
    if m.secret is not None:
        source["secretRef"] = {"name": m.secret}
    resource: Resource = {
        "name": m.name,
        "generation": m.generation,
        "source": source,
        "servedName": m.served_name,
        "engineArgs": dict(m.engine_args),
        "trustRemoteCode": m.trust_remote_code,
        "resident": m.resident,
        "residencyFloor": m.residency_floor.value,
        "kvFloor": exact_size(m.kv_floor_bytes),
        "kvCeiling": exact_size(m.kv_ceiling_bytes),
        "slo": {
            "ttft": exact_duration(m.slo.ttft),
            "tpot": exact_duration(m.slo.tpot),
            "holdBudget": exact_duration(m.slo.hold_budget),
        },
    }
    if m.context_tokens is not None:
        resource["contextLength"] = m.context_tokens
    if m.weights_bytes is not None:
        resource["weights"] = exact_size(m.weights_bytes)
    return resource


def model_status_resource(status: ModelStatus) -> Resource:
    resource: Resource = {
        "observedGeneration": status.generation,
        "conditions": _conditions(status.conditions),
        "url": status.url,
        "state": status.state.value,
        "replicas": status.replicas,
        "instances": status.instances,
        "ttft": status.ttft,
        "placements": [placement_resource(p) for p in status.placements],
    }
    return resource if status.pool is None else resource | {"pool": status.pool}


def pool_status_resource(status: PoolStatus) -> Resource:
    return {
        "observedGeneration": status.generation,
        "conditions": _conditions(status.conditions),
        "nodes": status.nodes,
        "instances": status.instances,
        "models": status.models,
    }


def slo_status_resource(status: SloStatus) -> Resource:
    return {
        "observedGeneration": status.generation,
        "conditions": _conditions(status.conditions),
        "models": status.models,
    }


def invalid_status_resource(status: InvalidStatus) -> Resource:
    return {"conditions": _conditions(status.conditions)}


def _conditions(conditions: tuple[Condition, ...]) -> list[Resource]:
    return [condition_resource(c) for c in conditions]


def exact_size(n_bytes: Bytes) -> str:
    """A quantity without rounding: the largest unit that divides it."""
    for unit, size in UNITS:
        if n_bytes and n_bytes % size == 0:
            return f"{n_bytes // size}{unit}"
    return str(n_bytes)


def exact_duration(seconds: Seconds) -> str:
    """A duration to the nanosecond: `30s`, `1.5s`, `800ms`."""
    exact = Decimal(repr(seconds)).quantize(NANOSECOND, rounding=ROUND_HALF_EVEN)
    if 0 < exact < 1:
        return f"{_plain(exact * 1000)}ms"
    return f"{_plain(exact)}s"


def _plain(number: Decimal) -> str:
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
