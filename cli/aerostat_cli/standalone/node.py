"""This machine as the Node object that a kubelet would write, and what it may be short of."""

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from aerostat_core.quantities import format_size
from aerostat_core.resources import Resource

# An engine of a small model with its runtime on the CPU device; the smallest converted model with its download.
ENGINE_BYTES: Final = 3 << 30
MODEL_BYTES: Final = 1 << 30


def node_resource(name: str) -> Resource:
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": platform.system().lower(),
        "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
    }
    ready = {"type": "Ready", "status": "True", "reason": "Standalone", "message": "this machine, served by aerostat up"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "status": {"conditions": [ready], "allocatable": {}},
    }


def shortages(model_cache: Path) -> Iterator[str]:
    """Warnings, not refusals: nobody knows here which models will be asked for."""
    memory = psutil.virtual_memory().available
    if memory < ENGINE_BYTES:
        yield f"only {format_size(memory)} of memory is free; an engine on the CPU device takes about {format_size(ENGINE_BYTES)}"
    place = next(p for p in (model_cache, *model_cache.parents) if p.exists())
    disk = shutil.disk_usage(place).free
    if disk < MODEL_BYTES:
        yield f"only {format_size(disk)} of disk is free at {place}, where models are kept (--model-cache)"
