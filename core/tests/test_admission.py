"""Every field of every CRD refuses what it should, with its path; every rule refuses one object and lets another pass."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, parse_instance, parse_model
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.port import InvalidResourceError, Kind, Violation
from aerostat_runtime.cluster.schema import Path_, Schema, crds_folder, load_schemas, schema_nodes, written
from aerostat_testing.rule_cases import ABSENT, CASE_IDS, CASES, FULL, Case, changed

pytestmark = pytest.mark.cpu

M, S, N = Kind.MODEL, Kind.SLO, Kind.INSTANCE
ADMISSION = Admission.of_this_build()
STRUCTURAL = {Kind(kind): schema.structural for kind, schema in load_schemas(crds_folder()).items()}
NOW = "2026-05-01T10:00:00Z"
CONDITION = {"type": "Ready", "status": "True", "reason": "Open", "message": "", "observedGeneration": 1, "lastTransitionTime": NOW}
STATUS: dict[Kind, Resource] = {
    Kind.MODEL: {
        "observedGeneration": 1,
        "conditions": [CONDITION],
        "url": "http://127.0.0.1:8080/v1",
        "pool": "p",
        "state": "Open",
        "replicas": 1,
        "instances": "1/1",
        "ttft": "310ms / 800ms",
        "placements": [{"instance": "p-n-0", "node": "n", "state": "Open"}],
    },
    Kind.POOL: {"observedGeneration": 1, "conditions": [CONDITION], "nodes": 1, "instances": "1/1", "models": 2},
    Kind.SLO: {"observedGeneration": 1, "conditions": [CONDITION], "models": 2},
    Kind.INSTANCE: {
        "observedGeneration": 1,
        "conditions": [CONDITION],
        "agentEpoch": 1,
        "heartbeat": NOW,
        "agentAddress": "127.0.0.1:7000",
        "summary": "m Open",
        "devices": [{"uuid": "cpu-0", "bytes": 4096, "health": "Healthy"}],
        "models": [
            {
                "name": "m",
                "generation": 1,
                "state": "Open",
                "reason": "",
                "message": "",
                "progress": "",
                "restarts": 0,
                "weightsBytes": 1,
                "reserveBytes": 1,
                "kvBytesPerToken": 1,
                "tokensPerSecond": 1.5,
                "requestsPerSecond": 0,
                "ttftP95Seconds": 0.3,
                "attainment": 0.99,
            }
        ],
    },
}


def violations(kind: Kind, resource: Resource, old: Resource | None = None) -> tuple[Violation, ...]:
    """What admission finds in an object with a status (an API server looks at the two apart)."""
    try:
        if "status" in resource:
            ADMISSION.check_status(kind, NamespacedName("default", "x"), resource["status"])
        ADMISSION.admit(resource, old)
    except InvalidResourceError as error:
        return error.violations
    return ()


def full(kind: Kind) -> Resource:
    return copy.deepcopy(FULL[kind] | {"status": STATUS[kind]})


def _put(target: Any, path: Path_, value: object) -> None:
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value


def fields() -> Iterator[tuple[Kind, Path_, Schema, Any]]:
    """All fields below spec and status with a good value each, as they stand in the full objects."""
    for kind, structural in STRUCTURAL.items():
        for schema, value, _, path in schema_nodes(structural, full(kind), None):
            if path and path[0] in ("spec", "status") and schema is not structural:
                yield kind, path, schema, value


WRONG_TYPES: dict[str, tuple[object, ...]] = {
    "string": (7, True, [], {}),
    "integer": ("1", 1.5, 1.0, True, [], {}),
    "number": ("1", True, [], {}),
    "boolean": ("true", 1, [], {}),
    "object": ("x", 1, []),
    "array": ("x", 1, {}),
}


def bad_values(schema: Schema, good: Any) -> Iterator[object]:
    yield from WRONG_TYPES[schema["type"]]
    if "default" not in schema:
        yield None
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "enum" in schema:
        yield from ("Nonsense", "", good.lower())
    if "pattern" in schema:
        yield from ("!", " ", f"{good} ", f"{good}\n", "-1")
    if schema.get("minLength"):
        yield ""
    if "maxLength" in schema:
        yield "9" * (schema["maxLength"] + 1)
    if "minItems" in schema:
        yield []
    if "maxItems" in schema:
        yield [{}] * (schema["maxItems"] + 1)
    if "minProperties" in schema:
        yield {}
    if "maxProperties" in schema:
        yield {f"k{i}": "v" for i in range(schema["maxProperties"] + 1)}
    if schema.get("format") == "date-time":
        yield from ("yesterday", "2026-05-01", "2026-05-01T10:00:00")


FIELDS = [pytest.param(kind, path, schema, good, id=f"{kind}.{written(path)}") for kind, path, schema, good in fields()]


@pytest.mark.parametrize(("kind", "path", "schema", "good"), FIELDS)
def test_a_field_refuses_bad_values_and_names_itself(kind: Kind, path: Path_, schema: Schema, good: Any) -> None:
    for value in bad_values(schema, good):
        resource = full(kind)
        _put(resource, path, value)
        found = violations(kind, resource)
        assert any(v.path == written(path) or v.path.startswith(f"{written(path)}[") for v in found), (value, found)


OBJECTS = [param for param in FIELDS if "properties" in param.values[2]]  # type: ignore[operator]


@pytest.mark.parametrize(("kind", "path", "schema", "good"), OBJECTS)
def test_an_unknown_field_is_refused_with_its_path(kind: Kind, path: Path_, schema: Schema, good: Any) -> None:
    resource = full(kind)
    _put(resource, (*path, "unheardOf"), 1)
    assert violations(kind, resource) == (Violation(f"{written(path)}.unheardOf", "unknown field"),)


@pytest.mark.parametrize(("kind", "path", "schema", "good"), OBJECTS)
def test_required_fields_are_asked_for(kind: Kind, path: Path_, schema: Schema, good: Any) -> None:
    for name in schema.get("required", ()):
        resource = full(kind)
        _put(resource, path, {key: value for key, value in good.items() if key != name})
        assert violations(kind, resource) == (Violation(f"{written(path)}.{name}", "Required value"),)


BOUNDED = [param for param in FIELDS if "minimum" in param.values[2]]  # type: ignore[operator]


@pytest.mark.parametrize(("kind", "path", "schema", "good"), BOUNDED)
def test_the_bounds_themselves_are_in_range(kind: Kind, path: Path_, schema: Schema, good: Any) -> None:
    for value in (schema[bound] for bound in ("minimum", "maximum") if bound in schema):
        resource = full(kind)
        _put(resource, path, value)
        assert not [v for v in violations(kind, resource) if "should be" in v.message]


@pytest.mark.parametrize("kind", list(FULL))
def test_the_full_object_is_admitted_as_it_is(kind: Kind) -> None:
    assert ADMISSION.admit(FULL[kind], None) == FULL[kind]
    assert ADMISSION.admit(FULL[kind], FULL[kind]) == FULL[kind]
    assert not violations(kind, full(kind))


def test_every_field_of_the_schema_is_in_the_full_objects() -> None:
    """So that nothing escapes the tests above. Two fields are alternatives, or refused."""
    seen = {(kind, id(schema)) for kind, _, schema, _ in fields()}
    missing = []

    def walk(kind: Kind, schema: Schema, path: str) -> None:
        if path.startswith((".spec", ".status")) and (kind, id(schema)) not in seen:
            missing.append(f"{kind}{path}")
            return
        for name, child in schema.get("properties", {}).items():
            walk(kind, child, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            if key in schema:
                walk(kind, schema[key], f"{path}.{key}")

    for kind, structural in STRUCTURAL.items():
        walk(kind, structural, "")
    assert missing == ["Model.spec.pool", "Model.spec.adapters.items"]


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_rule_refuses_what_breaks_it(case: Case) -> None:
    found = violations(case.kind, case.refused, case.replaced)
    assert any(v.path == case.path and case.message in v.message for v in found), found


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_rule_lets_its_neighbour_pass(case: Case) -> None:
    assert not violations(case.kind, case.passes, case.replaced)


def test_every_rule_has_a_case() -> None:
    broken = {v.message for case in CASES for v in violations(case.kind, case.refused, case.replaced)}
    for kind, structural in STRUCTURAL.items():
        for rule in _rules(structural):
            assert any(rule["message"] in message for message in broken), f"{kind}: {rule['rule']}"


def _rules(schema: Schema) -> Iterator[Schema]:
    yield from schema.get("x-kubernetes-validations", ())
    for child in schema.get("properties", {}).values():
        yield from _rules(child)
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from _rules(schema[key])


def test_a_change_that_keeps_immutable_fields_is_admitted() -> None:
    new = changed(FULL[M], {"spec.source.uri": "hf://org/model@v2", "spec.maxReplicas": 8})
    assert ADMISSION.admit(new, FULL[M]) == new


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"metadata": ABSENT}, "metadata"),
        ({"metadata": []}, "metadata"),
        ({"metadata.name": ABSENT}, "metadata.name"),
        ({"metadata.name": "Upper"}, "metadata.name"),
        ({"metadata.name": "../../etc"}, "metadata.name"),
        ({"metadata.name": ""}, "metadata.name"),
        ({"metadata.name": "a" * 254}, "metadata.name"),
        ({"metadata.name": 7}, "metadata.name"),
        ({"metadata.namespace": "a.b"}, "metadata.namespace"),
        ({"metadata.labels": {"tier": 1}}, "metadata.labels.tier"),
        ({"metadata.labels": {"no value": "x"}}, "metadata.labels"),
        ({"metadata.labels": {"a": "b c"}}, "metadata.labels.a"),
        ({"metadata.finalizers": []}, "metadata.finalizers"),
        ({"metadata.ownerReferences": [{"kind": "Pool"}]}, "metadata.ownerReferences[0].uid"),
        ({"kind": "Balloon"}, "kind"),
        ({"kind": ABSENT}, "kind"),
        ({"kind": []}, "kind"),
        ({"apiVersion": "aerostat.dev/v1"}, "apiVersion"),
        ({"apiVersion": ABSENT}, "apiVersion"),
        ({"spec": ABSENT}, "spec"),
        ({"spec": None}, "spec"),
        ({"extra": 1}, "extra"),
    ],
)
def test_the_rest_of_an_object_is_checked_too(changes: Mapping[str, object], path: str) -> None:
    assert path in {v.path for v in violations(S, changed(FULL[S], changes))}


def test_an_item_that_stands_twice_is_refused() -> None:
    twice = FULL[N]["spec"]["models"] * 2
    assert violations(N, changed(FULL[N], {"spec.models": twice})) == (Violation("spec.models[1]", 'Duplicate value: "m"'),)
    assert violations(N, changed(FULL[N], {"spec.devices.indices": [1, 1]}))[0].path == "spec.devices.indices"


def test_null_means_the_default() -> None:
    admitted = ADMISSION.admit(changed(FULL[M], {"spec.minReplicas": None, "spec.memory": None, "spec.overload": None}), None)
    assert admitted["spec"]["minReplicas"] == 1
    assert admitted["spec"]["memory"] == {"kvMin": "256Mi"}
    assert admitted["spec"]["overload"] == {"policy": "Queue"}


def test_defaults_are_not_shared_between_objects() -> None:
    bare = changed(FULL[M], {"spec.memory": ABSENT})
    ADMISSION.admit(bare, None)["spec"]["memory"]["kvMin"] = "changed"
    assert ADMISSION.admit(bare, None)["spec"]["memory"]["kvMin"] == "256Mi"
    assert "memory" not in bare["spec"], "what came in is left as it was"


def test_the_message_is_the_api_servers() -> None:
    with pytest.raises(InvalidResourceError) as one:
        ADMISSION.admit(changed(FULL[M], {"spec.minReplicas": -1}), None)
    assert str(one.value) == (
        'Model.aerostat.dev "x" is invalid: spec.minReplicas: Invalid value: -1: should be greater than or equal to 0'
    )
    with pytest.raises(InvalidResourceError) as two:
        ADMISSION.admit(changed(FULL[M], {"spec.residencyFloor": "Moon", "spec.slo": 7}), None)
    assert "[spec." in str(two.value)
    assert 'Unsupported value: "Moon": supported values: "Active", "Parked", "Host", "Disk"' in str(two.value)
    assert 'spec.slo: Invalid value: "integer": must be of type string' in str(two.value)


def test_what_is_admitted_can_be_read() -> None:
    assert parse_model(ADMISSION.admit(FULL[M], None)).engine_args == {"chunked-prefill-size": "2048"}
    assert parse_instance(ADMISSION.admit(FULL[N], None)).models[0].slo.ttft == 1.0
