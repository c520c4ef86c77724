"""From API objects (JSON) to specs, and back. The only place that knows field names of `crds/`.

Objects that come in passed the schema and have its defaults, so a missing required field is a programming error
(KeyError), not bad input. What a schema cannot say is checked by whoever reconciles.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aerostat_core.defaults import HOLD_BUDGET_IN_TTFT, HOLD_BUDGET_MAX
from aerostat_core.ids import InstanceName, ModelName, NamespacedName, NodeName, PoolName
from aerostat_core.quantities import parse_duration, parse_size
from aerostat_core.specs import (
    Condition,
    DemandDefinition,
    DeviceKind,
    Devices,
    EngineState,
    InstanceModel,
    InstanceModelStatus,
    InstanceSpec,
    InstanceStatus,
    Model,
    Node,
    Overload,
    OverloadPolicy,
    Placement,
    PlacementSettings,
    Pool,
    PoolMode,
    ResidencyFloor,
    RoutingSettings,
    Sharing,
    Slo,
    SloTargets,
)

API_VERSION = "aerostat.dev/v1alpha1"
Resource = dict[str, Any]

# A model without an SLO is served best effort; these targets only weigh its demand and bound how long a call is held.
BEST_EFFORT = SloTargets(ttft=10.0, tpot=1.0, hold_budget=HOLD_BUDGET_MAX)
_SUMMARIZED: Final = 6  # models that a table names of one instance


def name_of(resource: Mapping[str, Any]) -> NamespacedName:
    meta = resource["metadata"]
    return NamespacedName(meta.get("namespace", "default"), meta["name"])


def parse_model(resource: Resource) -> Model:
    meta, spec = resource["metadata"], resource["spec"]
    memory, overload = spec.get("memory", {}), spec.get("overload", {})
    return Model(
        name=name_of(resource),
        uid=meta.get("uid", ""),
        generation=meta.get("generation", 1),
        labels=meta.get("labels", {}),
        created_at=meta.get("creationTimestamp", ""),
        source_uri=spec["source"]["uri"],
        secret=spec["source"].get("secretRef", {}).get("name"),
        served_name=spec.get("servedName") or meta["name"],
        pool=PoolName(spec["pool"]) if spec.get("pool") else None,
        pool_labels=spec.get("poolSelector", {}).get("matchLabels", {}),
        min_replicas=spec["minReplicas"],
        max_replicas=spec["maxReplicas"],
        tensor_parallel=spec["tensorParallel"],
        slo=spec.get("slo"),
        weights_bytes=parse_size(memory["weights"]) if "weights" in memory else None,
        kv_min_bytes=parse_size(memory["kvMin"]),
        kv_max_bytes=parse_size(memory["kvMax"]) if "kvMax" in memory else None,
        context_tokens=spec.get("contextLength"),
        engine_args=spec.get("engineArgs", {}),
        residency_floor=ResidencyFloor(spec["residencyFloor"]),
        overload=Overload(
            policy=OverloadPolicy(overload.get("policy", "Queue")),
            spill_to=ModelName(overload["spillTo"]) if "spillTo" in overload else None,
        ),
        trust_remote_code=spec["trustRemoteCode"],
        deleting="deletionTimestamp" in meta,
    )


def parse_slo(resource: Resource) -> Slo:
    spec = resource["spec"]
    ttft = parse_duration(spec["ttft"])
    budget = parse_duration(spec["holdBudget"]) if "holdBudget" in spec else min(ttft * HOLD_BUDGET_IN_TTFT, HOLD_BUDGET_MAX)
    return Slo(
        name=name_of(resource),
        generation=resource["metadata"].get("generation", 1),
        ttft=ttft,
        tpot=parse_duration(spec["tpot"]),
        hold_budget=budget,
        objective=spec["objectivePercent"] / 100,
    )


def parse_pool(resource: Resource) -> Pool:
    meta, spec = resource["metadata"], resource["spec"]
    devices, placement, routing = spec["devices"], spec["placement"], spec["routing"]
    return Pool(
        name=name_of(resource),
        uid=meta.get("uid", ""),
        generation=meta.get("generation", 1),
        labels=meta.get("labels", {}),
        created_at=meta.get("creationTimestamp", ""),
        mode=PoolMode(spec["mode"]),
        sharing=Sharing(spec["sharing"]),
        node_selector=spec.get("nodeSelector", {}),
        devices=Devices(
            kind=DeviceKind(devices["kind"]),
            count=devices.get("count", 0),
            memory_bytes=parse_size(devices.get("memory", "0")),
            reserve_bytes=parse_size(devices["reserve"]),
        ),
        devices_per_instance=spec["devicesPerInstance"],
        allow_remote_code=spec["allowRemoteCode"],
        host_pool_bytes=parse_size(spec["hostPool"]),
        idle_time=parse_duration(spec["idleTime"]),
        placement=PlacementSettings(
            demand=DemandDefinition(placement["demand"]),
            hysteresis=placement["hysteresisPercent"] / 100,
            max_moves_per_cycle=placement["maxMovesPerCycle"],
        ),
        routing=RoutingSettings(
            lease_ttl=parse_duration(routing["leaseTTL"]),
            memory_price=parse_duration(routing["memoryPricePerGi"]) / 2**30,
            replica_penalty=parse_duration(routing["replicaPenalty"]),
        ),
    )


def parse_node(resource: Resource) -> Node:
    """A Kubernetes Node. GPUs are counted from its allocatable, their memory is the label that GPU discovery sets."""
    meta = resource["metadata"]
    labels = meta.get("labels", {})
    status = resource.get("status", {})
    conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
    return Node(
        name=NodeName(meta["name"]),
        labels=labels,
        schedulable=not resource.get("spec", {}).get("unschedulable", False),
        ready=conditions.get("Ready") == "True",
        device_count=int(status.get("allocatable", {}).get("nvidia.com/gpu", 0)),
        device_bytes=int(labels.get("nvidia.com/gpu.memory", 0)) * 2**20,
    )


def parse_instance(resource: Resource) -> InstanceSpec:
    spec = resource["spec"]
    devices = spec["devices"]
    return InstanceSpec(
        name=name_of(resource),
        pool=PoolName(spec["pool"]),
        node=NodeName(spec["node"]),
        device_kind=DeviceKind(devices["kind"]),
        devices=tuple(devices["indices"]),
        device_bytes=parse_size(devices["memory"]),
        reserve_bytes=parse_size(devices["reserve"]),
        sharing=Sharing(spec["sharing"]),
        models=tuple(_parse_instance_model(m) for m in spec.get("models", ())),
        host_pool_bytes=parse_size(spec["limits"]["hostPool"]),
        idle_time=parse_duration(spec["limits"]["idleTime"]),
        lease_ttl=parse_duration(spec["routing"]["leaseTTL"]),
        memory_price=parse_duration(spec["routing"]["memoryPricePerGi"]) / 2**30,
        draining=spec.get("draining", False),
    )


def _parse_instance_model(m: Mapping[str, Any]) -> InstanceModel:
    return InstanceModel(
        name=ModelName(m["name"]),
        generation=m["generation"],
        source_uri=m["source"]["uri"],
        secret=m["source"].get("secretRef", {}).get("name"),
        served_name=m["servedName"],
        engine_args=m.get("engineArgs", {}),
        context_tokens=m.get("contextLength"),
        trust_remote_code=m.get("trustRemoteCode", False),
        resident=m["resident"],
        residency_floor=ResidencyFloor(m["residencyFloor"]),
        weights_bytes=parse_size(m["weights"]) if "weights" in m else None,
        kv_floor_bytes=parse_size(m["kvFloor"]),
        kv_ceiling_bytes=parse_size(m["kvCeiling"]),
        slo=SloTargets(
            ttft=parse_duration(m["slo"]["ttft"]),
            tpot=parse_duration(m["slo"]["tpot"]),
            hold_budget=parse_duration(m["slo"]["holdBudget"]),
        ),
    )


def parse_conditions(status: Mapping[str, Any]) -> tuple[Condition, ...]:
    return tuple(
        Condition(
            type=c["type"],
            status=c["status"],
            reason=c["reason"],
            message=c.get("message", ""),
            observed_generation=c.get("observedGeneration", 0),
            last_transition_time=c.get("lastTransitionTime", ""),
        )
        for c in status.get("conditions", ())
    )


def condition_resource(c: Condition) -> Resource:
    """Without a generation where it is not known: `kubectl wait` would wait for ever for one that is too low."""
    return {
        "type": c.type,
        "status": c.status,
        "reason": c.reason,
        "message": c.message,
        "lastTransitionTime": c.last_transition_time,
        **({"observedGeneration": c.observed_generation} if c.observed_generation else {}),
    }


def parse_instance_status(resource: Resource) -> InstanceStatus:
    """Status of an Instance; an object that no agent has seen yet has epoch 0 and no models."""
    status = resource.get("status", {})
    return InstanceStatus(
        name=name_of(resource),
        agent_epoch=status.get("agentEpoch", 0),
        heartbeat=status.get("heartbeat", ""),
        agent_address=status.get("agentAddress", ""),
        models=tuple(_parse_model_status(m) for m in status.get("models", ())),
        device_bytes=sum(d.get("bytes", 0) for d in status.get("devices", ())),
        conditions=parse_conditions(status),
    )


def _parse_model_status(m: Mapping[str, Any]) -> InstanceModelStatus:
    return InstanceModelStatus(
        name=ModelName(m["name"]),
        generation=m.get("generation", 0),
        state=EngineState(m["state"]),
        reason=m.get("reason", ""),
        message=m.get("message", ""),
        progress=m.get("progress", ""),
        weights_bytes=m.get("weightsBytes"),
        reserve_bytes=m.get("reserveBytes"),
        kv_bytes_per_token=m.get("kvBytesPerToken"),
        tokens_per_second=m.get("tokensPerSecond"),
        requests_per_second=m.get("requestsPerSecond"),
        ttft_p95=m.get("ttftP95Seconds"),
        attainment=m.get("attainment"),
        restarts=m.get("restarts", 0),
    )


def instance_status_resource(status: InstanceStatus, devices: tuple[Resource, ...] = ()) -> Resource:
    """The status object that an agent writes. Figures that are None are left out."""
    return {
        "agentEpoch": status.agent_epoch,
        "heartbeat": status.heartbeat,
        "agentAddress": status.agent_address,
        "summary": _summary(status.models),
        "devices": list(devices),
        "models": [_model_status_resource(m) for m in status.models],
        "conditions": [condition_resource(c) for c in status.conditions],
    }


def _summary(models: Sequence[InstanceModelStatus]) -> str:
    """Tables show one string: a server prints no more than the first of several values."""
    named = [f"{m.name} {m.state.value}" for m in models[:_SUMMARIZED]]
    return ", ".join(named + [f"{len(models) - _SUMMARIZED} more"] * (len(models) > _SUMMARIZED))


def _model_status_resource(m: InstanceModelStatus) -> Resource:
    figures = {
        "weightsBytes": m.weights_bytes,
        "reserveBytes": m.reserve_bytes,
        "kvBytesPerToken": m.kv_bytes_per_token,
        "tokensPerSecond": m.tokens_per_second,
        "requestsPerSecond": m.requests_per_second,
        "ttftP95Seconds": m.ttft_p95,
        "attainment": m.attainment,
    }
    words = {"name": m.name, "generation": m.generation, "state": m.state.value, "reason": m.reason, "message": m.message}
    known = {key: value for key, value in figures.items() if value is not None}
    return words | {"progress": m.progress, "restarts": m.restarts} | known


def placement_resource(p: Placement) -> Resource:
    return {"instance": p.instance, "node": p.node, "state": p.state.value}


def parse_placement(p: Mapping[str, Any]) -> Placement:
    return Placement(instance=InstanceName(p["instance"]), node=NodeName(p["node"]), state=EngineState(p["state"]))
