"""The CRDs keep what an API server demands of them, what our conventions promise, and what `resources` reads."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.quantities import parse_duration, parse_size
from aerostat_core.resources import API_VERSION, Resource, parse_model, parse_pool, parse_slo
from aerostat_core.specs import DemandDefinition, DeviceKind, EngineState, OverloadPolicy, PoolMode, ResidencyFloor, Sharing
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.port import Kind
from aerostat_runtime.cluster.schema import crds_folder

pytestmark = pytest.mark.cpu

CRDS = {crd["spec"]["names"]["kind"]: crd for crd in (yaml.safe_load(p.read_text()) for p in crds_folder().glob("*.yaml"))}
KINDS = pytest.mark.parametrize("kind", sorted(CRDS))
SAMPLES = sorted((crds_folder() / "samples").rglob("*.yaml"))
SIZE = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
DURATION = r"^([0-9]{1,6}(\.[0-9]{1,18})?(ms|s|m|h)){1,4}$"


def schema_of(kind: str) -> Any:
    (version,) = CRDS[kind]["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def nodes(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}.*")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


def documents(path: Path) -> list[Resource]:
    return list(yaml.safe_load_all(path.read_text()))


def test_there_is_a_crd_for_each_kind_that_is_ours() -> None:
    assert set(CRDS) == set(Kind) - {Kind.NODE}


@KINDS
def test_names_and_columns_are_as_the_conventions_say(kind: str) -> None:
    crd = CRDS[kind]
    spec, names = crd["spec"], crd["spec"]["names"]
    (version,) = spec["versions"]
    assert crd["metadata"]["name"] == f"{names['plural']}.aerostat.dev"
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert f"{spec['group']}/{version['name']}" == API_VERSION
    assert spec["scope"] == "Namespaced"
    assert names["shortNames"] == {"Model": ["mdl"], "Pool": ["pool"], "SLO": ["slo"], "Instance": ["inst"]}[kind]
    assert names["categories"] == ["aerostat"]
    assert version["subresources"]["status"] == {}
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns[0] == "Ready"
    assert columns[-1] == "Age"
    if kind == "Model":
        assert columns == ["Ready", "Pool", "State", "Instances", "TTFT p95 / target", "Age"]


@KINDS
def test_print_columns_point_at_fields_of_the_schema(kind: str) -> None:
    (version,) = CRDS[kind]["spec"]["versions"]
    known = {re.sub(r"\[\]$", "", path) for path, _ in nodes(schema_of(kind))}
    for column in version["additionalPrinterColumns"]:
        path = re.sub(r"\[[^]]*\]", "[]", column["jsonPath"])
        assert path.startswith(".metadata.") or path in known, column
    scale = version["subresources"].get("scale", {})
    assert {scale[key] for key in ("specReplicasPath", "statusReplicasPath") if key in scale} <= known


@KINDS
def test_every_field_is_described_and_bounded(kind: str) -> None:
    """Bounds keep objects small, and the cost of rules below what an API server allows."""
    for path, schema in nodes(schema_of(kind)):
        if path == ".metadata":
            assert schema == {"type": "object"}, "an API server allows nothing else here"
            continue
        assert schema.get("description"), f"{path} has no description"
        match schema["type"]:
            case "string" if path not in (".apiVersion", ".kind"):
                assert "maxLength" in schema or "enum" in schema, f"{path} has no maxLength"
            case "array":
                assert "maxItems" in schema, f"{path} has no maxItems"
            case "object" if "additionalProperties" in schema:
                assert "maxProperties" in schema, f"{path} has no maxProperties"
            case "integer" | "number":
                assert "minimum" in schema, f"{path} has no minimum"
        for value in schema.get("enum", ()):
            explained = f"{value}:" in schema["description"]
            assert explained or path.endswith((".sharing", ".residencyFloor")), f"{path} does not explain {value}"
            assert value in schema["description"], f"{path} does not explain {value}"


@KINDS
def test_rules_have_messages_and_can_be_matched_up(kind: str) -> None:
    for path, schema in nodes(schema_of(kind)):
        for rule in schema.get("x-kubernetes-validations", ()):
            assert rule["message"], path
            assert set(rule) <= {"rule", "message", "fieldPath"}, path
            assert "oldSelf" not in rule["rule"] or "[]" not in path, f"{path}: items of a list have no old self here"


@KINDS
def test_patterns_of_sizes_and_durations_are_the_ones_that_are_tested(kind: str) -> None:
    names = {
        SIZE: {"weights", "kvMin", "kvMax", "memory", "reserve", "hostPool", "kvFloor", "kvCeiling"},
        DURATION: {"ttft", "tpot", "holdBudget", "idleTime", "leaseTTL", "memoryPricePerGi", "replicaPenalty"},
    }
    for path, schema in nodes(schema_of(kind)["properties"]["spec"]):
        for pattern, fields in names.items():
            if path.rpartition(".")[2] in fields and schema["type"] == "string":
                assert schema["pattern"] == pattern, path


@given(st.from_regex(SIZE, fullmatch=True).filter(str.isascii))
def test_what_the_size_pattern_lets_in_can_be_read(text: str) -> None:
    assert parse_size(text) >= 0


@given(st.from_regex(DURATION, fullmatch=True).filter(str.isascii))
def test_what_the_duration_pattern_lets_in_can_be_read(text: str) -> None:
    assert parse_duration(text) >= 0


@pytest.mark.parametrize(
    ("kind", "path", "values"),
    [
        ("Pool", ".spec.mode", PoolMode),
        ("Pool", ".spec.sharing", Sharing),
        ("Pool", ".spec.devices.kind", DeviceKind),
        ("Pool", ".spec.placement.demand", DemandDefinition),
        ("Model", ".spec.residencyFloor", ResidencyFloor),
        ("Model", ".spec.overload.policy", OverloadPolicy),
        ("Model", ".status.state", EngineState),
        ("Model", ".status.placements[].state", EngineState),
        ("Instance", ".spec.sharing", Sharing),
        ("Instance", ".spec.devices.kind", DeviceKind),
        ("Instance", ".spec.models[].residencyFloor", ResidencyFloor),
        ("Instance", ".status.models[].state", EngineState),
    ],
)
def test_enums_are_those_of_the_code(kind: str, path: str, values: Any) -> None:
    assert set(dict(nodes(schema_of(kind)))[path]["enum"]) == {str(value) for value in values}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_samples_are_admitted_and_read(path: Path) -> None:
    parse = {"Model": parse_model, "Pool": parse_pool, "SLO": parse_slo}
    for document in documents(path):
        admitted = Admission.of_this_build().admit(document, None)
        read: Any = parse[document["kind"]](admitted)
        assert read.name.name == document["metadata"]["name"]


def test_the_quickstart_is_two_models_of_one_cold_cpu_pool() -> None:
    objects = [d for path in SAMPLES if path.parent.name == "quickstart" for d in documents(path)]
    (pool,) = (d for d in objects if d["kind"] == "Pool")
    models = [d for d in objects if d["kind"] == "Model"]
    assert {m["metadata"]["name"] for m in models} == {"assistant", "coder"}
    assert all(m["spec"]["pool"] == pool["metadata"]["name"] for m in models)
    assert all(m["spec"]["memory"]["kvMin"] == m["spec"]["memory"]["kvMax"] for m in models), "fixed budgets"


MINIMAL = {
    "Model": {"source": {"uri": "pypi://x@1"}, "pool": "p"},
    "Pool": {"devices": {"kind": "CUDA"}},
    "SLO": {"ttft": "1s", "tpot": "50ms"},
}


def test_the_least_that_one_may_write_has_the_documented_defaults() -> None:
    def read(kind: str) -> Any:
        resource = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "x"}, "spec": MINIMAL[kind]}
        admitted = Admission.of_this_build().admit(resource, None)
        return {"Model": parse_model, "Pool": parse_pool, "SLO": parse_slo}[kind](admitted)

    model, pool, slo = read("Model"), read("Pool"), read("SLO")
    assert (model.min_replicas, model.max_replicas, model.tensor_parallel) == (1, 1, 1)
    assert model.kv_min_bytes == 256 * 2**20
    assert model.kv_max_bytes is None
    assert model.residency_floor is ResidencyFloor.PARKED
    assert model.overload.policy is OverloadPolicy.QUEUE
    assert model.served_name == "x"
    assert not model.trust_remote_code
    assert (pool.mode, pool.sharing) == (PoolMode.COLD, Sharing.CONCURRENT)
    assert (pool.devices_per_instance, pool.idle_time, pool.host_pool_bytes, pool.devices.reserve_bytes) == (1, 300.0, 0, 0)
    assert (pool.placement.demand, pool.placement.hysteresis) == (DemandDefinition.TOKEN_RATE, 0.1)
    assert (pool.placement.max_moves_per_cycle, pool.routing.lease_ttl) == (1, 1.0)
    assert (slo.objective, slo.hold_budget) == (0.95, 10.0)
