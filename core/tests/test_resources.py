"""Objects are read with their units and written back as the CRDs have them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.ids import InstanceName, ModelName, NamespacedName, NodeName, PoolName
from aerostat_core.resources import (
    API_VERSION,
    condition_resource,
    instance_status_resource,
    name_of,
    parse_conditions,
    parse_instance,
    parse_instance_status,
    parse_model,
    parse_node,
    parse_placement,
    parse_pool,
    parse_slo,
    placement_resource,
)
from aerostat_core.specs import (
    Condition,
    DeviceKind,
    EngineState,
    InstanceModelStatus,
    InstanceStatus,
    OverloadPolicy,
    Placement,
    PoolMode,
    ResidencyFloor,
    Sharing,
)
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.port import Kind

pytestmark = pytest.mark.cpu

NOW = "2026-05-01T10:00:00Z"
NAME = NamespacedName("default", "x")


def admitted(kind: str, spec: dict[str, Any], **metadata: Any) -> Any:
    resource = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "x", "namespace": "default"}, "spec": spec}
    out = Admission.of_this_build().admit(resource, None)
    return {**out, "metadata": out["metadata"] | metadata}


def test_a_model_is_read_with_its_units() -> None:
    spec = {
        "source": {"uri": "pypi://x@1"},
        "servedName": "Org/X",
        "poolSelector": {"matchLabels": {"tier": "gold"}},
        "minReplicas": 0,
        "maxReplicas": 3,
        "memory": {"weights": "270Mi", "kvMin": "1Gi", "kvMax": "2Gi"},
        "residencyFloor": "Disk",
        "overload": {"policy": "Spill", "spillTo": "y"},
    }
    model = parse_model(admitted("Model", spec, uid="u", generation=4, labels={"a": "b"}, creationTimestamp=NOW))
    assert (model.name, model.uid, model.generation, model.created_at) == (NAME, "u", 4, NOW)
    assert (model.served_name, model.pool, model.pool_labels) == ("Org/X", None, {"tier": "gold"})
    assert (model.weights_bytes, model.kv_min_bytes, model.kv_max_bytes) == (270 << 20, 1 << 30, 2 << 30)
    assert model.residency_floor is ResidencyFloor.DISK
    assert (model.overload.policy, model.overload.spill_to) == (OverloadPolicy.SPILL, ModelName("y"))
    assert not model.deleting
    assert parse_model(admitted("Model", spec, deletionTimestamp=NOW)).deleting


def test_a_pool_is_read_with_its_units() -> None:
    spec = {
        "mode": "Hot",
        "devices": {"kind": "CPU", "count": 2, "memory": "4Gi", "reserve": "1Gi"},
        "placement": {"hysteresisPercent": 25},
        "routing": {"memoryPricePerGi": "1s"},
    }
    pool = parse_pool(admitted("Pool", spec))
    assert (pool.mode, pool.sharing, pool.devices.kind) == (PoolMode.HOT, Sharing.CONCURRENT, DeviceKind.CPU)
    assert (pool.devices.count, pool.devices.memory_bytes, pool.devices.reserve_bytes) == (2, 4 << 30, 1 << 30)
    assert pool.placement.hysteresis == 0.25
    assert pool.routing.memory_price * 2**30 == 1.0, "seconds per byte"


@pytest.mark.parametrize(("ttft", "budget"), [("1s", 10.0), ("20s", 120.0)])
def test_the_hold_budget_follows_the_ttft_up_to_its_limit(ttft: str, budget: float) -> None:
    assert parse_slo(admitted("SLO", {"ttft": ttft, "tpot": "50ms"})).hold_budget == budget
    assert parse_slo(admitted("SLO", {"ttft": ttft, "tpot": "50ms", "holdBudget": "3s"})).hold_budget == 3.0


def test_an_instance_is_read_with_its_units() -> None:
    spec = {
        "pool": "p",
        "node": "n",
        "devices": {"kind": "CUDA", "indices": [2, 3], "memory": "80Gi", "reserve": "2Gi"},
        "sharing": "Rounds",
        "models": [
            {
                "name": "m",
                "generation": 7,
                "source": {"uri": "file:///m", "secretRef": {"name": "s"}},
                "servedName": "M",
                "resident": True,
                "residencyFloor": "Host",
                "kvFloor": "1Gi",
                "kvCeiling": "2Gi",
                "slo": {"ttft": "800ms", "tpot": "50ms", "holdBudget": "8s"},
            }
        ],
        "limits": {"hostPool": "8Gi", "idleTime": "5m"},
        "routing": {"leaseTTL": "1500ms", "memoryPricePerGi": "0s"},
    }
    instance = parse_instance(admitted("Instance", spec))
    assert (instance.pool, instance.node, instance.devices, instance.tensor_parallel) == (PoolName("p"), NodeName("n"), (2, 3), 2)
    assert (instance.device_bytes, instance.reserve_bytes, instance.host_pool_bytes) == (80 << 30, 2 << 30, 8 << 30)
    assert (instance.idle_time, instance.lease_ttl, instance.memory_price, instance.draining) == (300.0, 1.5, 0.0, False)
    (model,) = instance.models
    assert (model.secret, model.weights_bytes, model.trust_remote_code) == ("s", None, False)
    assert (model.slo.ttft, model.slo.tpot, model.slo.hold_budget) == (0.8, 0.05, 8.0)


def test_a_node_counts_its_gpus_from_what_kubernetes_says() -> None:
    node = parse_node(
        {
            "metadata": {"name": "n", "labels": {"nvidia.com/gpu.memory": "81920"}},
            "spec": {"unschedulable": True},
            "status": {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]},
        }
    )
    assert (node.device_count, node.device_bytes, node.ready, node.schedulable) == (8, 80 << 30, True, False)
    bare = parse_node({"metadata": {"name": "n"}})
    assert (bare.device_count, bare.device_bytes, bare.ready, bare.schedulable) == (0, 0, False, True)


def test_an_instance_that_no_agent_has_seen_has_an_empty_status() -> None:
    status = parse_instance_status({"metadata": {"name": "x"}})
    assert status == InstanceStatus(name=NAME, agent_epoch=0, heartbeat="", agent_address="")


WORD = st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,9}", fullmatch=True).filter(str.isascii)
CONDITION = st.builds(
    Condition,
    type=WORD,
    status=st.sampled_from(["True", "False", "Unknown"]),
    reason=WORD,
    message=st.text(max_size=20),
    observed_generation=st.integers(0, 9),
    last_transition_time=st.just(NOW),
)
BYTES = st.none() | st.integers(0, 2**50)
FIGURE = st.none() | st.floats(0, 1e6)
MODEL_STATUS = st.builds(
    InstanceModelStatus,
    name=WORD.map(ModelName),
    generation=st.integers(0, 9),
    state=st.sampled_from(EngineState),
    reason=WORD | st.just(""),
    message=st.text(max_size=20),
    progress=st.text(max_size=20),
    weights_bytes=BYTES,
    reserve_bytes=BYTES,
    kv_bytes_per_token=BYTES,
    tokens_per_second=FIGURE,
    requests_per_second=FIGURE,
    ttft_p95=FIGURE,
    attainment=st.none() | st.floats(0, 1),
    restarts=st.integers(0, 5),
)


@given(st.lists(MODEL_STATUS, max_size=3, unique_by=lambda m: m.name), st.lists(CONDITION, max_size=3, unique_by=lambda c: c.type))
def test_an_instance_status_is_read_back_as_it_was_written_and_fits_the_schema(
    models: list[InstanceModelStatus], conditions: list[Condition]
) -> None:
    status = InstanceStatus(
        name=NAME,
        agent_epoch=3,
        heartbeat=NOW,
        agent_address="127.0.0.1:1",
        models=tuple(models),
        device_bytes=4096,
        conditions=tuple(conditions),
    )
    devices = ({"uuid": "cpu-0", "bytes": 4096, "health": "Healthy"},)
    written = instance_status_resource(status, devices)
    Admission.of_this_build().check_status(Kind.INSTANCE, NAME, written)
    assert parse_instance_status({"metadata": {"name": "x"}, "status": written}) == status


@given(CONDITION)
def test_a_condition_is_read_back_as_it_was_written(condition: Condition) -> None:
    (read,) = parse_conditions({"conditions": [condition_resource(condition)]})
    assert (read, read.last_transition_time) == (condition, NOW)


def test_a_condition_of_no_known_generation_has_none_since_kubectl_wait_would_wait_for_ever_on_generation_0() -> None:
    known, unknown = (Condition(type="Ready", status="True", reason="r", message="", observed_generation=n) for n in (3, 0))
    assert condition_resource(known)["observedGeneration"] == 3
    assert "observedGeneration" not in condition_resource(unknown)


def test_a_placement_is_read_back_as_it_was_written() -> None:
    placement = Placement(instance=InstanceName("i"), node=NodeName("n"), state=EngineState.OPEN)
    written = placement_resource(placement)
    assert parse_placement(written) == placement
    Admission.of_this_build().check_status(Kind.MODEL, NAME, {"placements": [written]})


def test_an_object_without_a_namespace_is_in_the_default_one() -> None:
    assert name_of({"metadata": {"name": "x"}}) == NAME
    assert name_of({"metadata": {"name": "x", "namespace": "team"}}) == NamespacedName("team", "x")
