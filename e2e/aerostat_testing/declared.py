"""Objects as an API server would hand them out, with their defaults, for tests of what watches a cluster."""

from collections.abc import Sequence
from typing import Any

from aerostat_core.resources import API_VERSION, Resource


def model_object(name: str, **spec: Any) -> Resource:
    defaults: Resource = {
        "source": {"uri": f"file:///models/{name}"},
        "pool": "cpu",
        "minReplicas": 1,
        "maxReplicas": 1,
        "tensorParallel": 1,
        "memory": {"kvMin": "32Mi"},
        "residencyFloor": "Disk",
        "trustRemoteCode": False,
    }
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"apiVersion": API_VERSION, "kind": "Model", "metadata": meta, "spec": defaults | spec}


def slo_object(name: str, *, ttft: str = "5s", hold_budget: str = "5s") -> Resource:
    meta = {"name": name, "namespace": "default", "generation": 1}
    spec = {"ttft": ttft, "tpot": "500ms", "holdBudget": hold_budget, "objectivePercent": 95}
    return {"apiVersion": API_VERSION, "kind": "SLO", "metadata": meta, "spec": spec}


def instance_object(name: str, models: Sequence[str], *, address: str = "", lease_ttl: str = "1s") -> Resource:
    """`address` is the agent's; the models' specs are of no interest to a router."""
    spec = {
        "pool": "cpu",
        "node": "node-a",
        "devices": {"kind": "CPU", "indices": [0], "memory": "1Gi", "reserve": "0"},
        "sharing": "Concurrent",
        "models": [_instance_model(model) for model in models],
        "limits": {"hostPool": "0", "idleTime": "300s"},
        "routing": {"leaseTTL": lease_ttl, "memoryPricePerGi": "0s"},
    }
    meta = {"name": name, "namespace": "default", "generation": 1}
    status = {"agentEpoch": 1, "agentAddress": address} if address else {}
    return {"apiVersion": API_VERSION, "kind": "Instance", "metadata": meta, "spec": spec, "status": status}


def _instance_model(name: str) -> Resource:
    return {
        "name": name,
        "generation": 1,
        "source": {"uri": f"file:///models/{name}"},
        "servedName": name,
        "resident": True,
        "residencyFloor": "Disk",
        "kvFloor": "32Mi",
        "kvCeiling": "32Mi",
        "slo": {"ttft": "5s", "tpot": "500ms", "holdBudget": "5s"},
    }
