"""Manifests for tests, small enough that an engine of them starts in seconds rather than minutes."""

from pathlib import Path
from typing import Any

Resource = dict[str, Any]
API_VERSION = "aerostat.dev/v1alpha1"


def _object(kind: str, name: str, spec: Resource) -> Resource:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def cpu_pool(name: str = "cpu", *, memory: str = "1Gi", **spec: Any) -> Resource:
    return _object("Pool", name, {"mode": "Cold", "devices": {"kind": "CPU", "count": 1, "memory": memory}} | spec)


def slo(name: str = "interactive", *, ttft: str = "5s", hold_budget: str = "120s") -> Resource:
    return _object("SLO", name, {"ttft": ttft, "tpot": "500ms", "holdBudget": hold_budget})


def model(name: str, weights: Path, *, kv: str = "32Mi", min_replicas: int = 1, dtype: str = "float32", **spec: Any) -> Resource:
    """Float32 unless told otherwise: greedy tokens then depend on nothing but the prompt."""
    common: Resource = {
        "source": {"uri": f"file://{weights}"},
        "pool": "cpu",
        "slo": "interactive",
        "minReplicas": min_replicas,
        "memory": {"kvMin": kv, "kvMax": kv},
        "engineArgs": {"dtype": dtype},
    }
    return _object("Model", name, common | spec)
