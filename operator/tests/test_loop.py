"""The operator's loop over the folder adapter, in real time: what users change, agents report and disks refuse."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aerostat_core.errors import TemporaryError
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, parse_conditions
from aerostat_operator.loop import OperatorSettings, run_operator
from aerostat_operator.policy.statuses import find, format_time
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster.folder import FolderCluster
from aerostat_runtime.cluster.port import Kind

pytestmark = pytest.mark.cpu
WAIT = 20.0
NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "node1", "namespace": "default", "labels": {}},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}


class FailingCluster(FolderCluster):
    """Refuses the first writes of the statuses that it is told to, and counts all writes."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.refuse: dict[str, int] = {}
        self.n_writes = 0

    async def apply(self, resource: Resource) -> Resource:
        self.n_writes += 1
        return await super().apply(resource)

    async def patch_status(self, kind: Kind, name: NamespacedName, status: Resource) -> bool:
        self.n_writes += 1
        if self.refuse.get(name.name, 0) > 0:
            self.refuse[name.name] -= 1
            raise TemporaryError("NoSpace", "no space left", retry_after=0.1)
        return await super().patch_status(kind, name, status)


@asynccontextmanager
async def operator(state: Path, resync: float = 30.0) -> AsyncIterator[FailingCluster]:
    cluster, stop = FailingCluster(state), asyncio.Event()
    await cluster.put(NODE)
    settings = OperatorSettings(url="http://127.0.0.1:8080/v1", resync=resync)
    async with asyncio.timeout(3 * WAIT):
        task = asyncio.create_task(run_operator(cluster, SystemClock(), stop=stop, settings=settings))
        try:
            yield cluster
        finally:
            stop.set()
            await task
            await cluster.close()


async def put(cluster: FolderCluster, kind: Kind, name: str, **spec: Any) -> None:
    metadata = {"name": name, "namespace": "default"}
    await cluster.apply({"apiVersion": "aerostat.dev/v1alpha1", "kind": kind.value, "metadata": metadata, "spec": spec})


async def pool_and_model(cluster: FolderCluster) -> None:
    await put(cluster, Kind.POOL, "cpu", devices={"kind": "CPU", "count": 1, "memory": "2Gi"})
    await put(cluster, Kind.MODEL, "m", source={"uri": "pypi://m@1"}, pool="cpu")


async def get(cluster: FolderCluster, kind: Kind, name: str) -> Resource | None:
    return next((r for r in await cluster.list(kind) if r["metadata"]["name"] == name), None)


async def until(cluster: FolderCluster, kind: Kind, name: str, holds: Callable[[Resource | None], bool]) -> Resource | None:
    async with asyncio.timeout(WAIT):
        async for _ in cluster.watch(kind):
            if holds(found := await get(cluster, kind, name)):
                return found
    raise AssertionError(f"the watch of {kind} ended")


def has(kind: str, status: str, reason: str | None = None) -> Callable[[Resource | None], bool]:
    def holds(resource: Resource | None) -> bool:
        c = find(parse_conditions((resource or {}).get("status", {})), kind)
        return c is not None and c.status == status and reason in (None, c.reason)

    return holds


def lists(*names: str) -> Callable[[Resource | None], bool]:
    return lambda resource: resource is not None and [m["name"] for m in resource["spec"]["models"]] == list(names)


async def report_open(cluster: FolderCluster) -> None:
    for resource in await cluster.list(Kind.INSTANCE):
        models = [{"name": m["name"], "generation": m["generation"], "state": "Open"} for m in resource["spec"]["models"]]
        status = {"agentEpoch": 1, "heartbeat": format_time(SystemClock().wall()), "agentAddress": "127.0.0.1:1", "models": models}
        await cluster.patch_status(Kind.INSTANCE, NamespacedName("default", resource["metadata"]["name"]), status)


async def test_a_model_goes_from_manifest_to_ready_with_one_note_per_transition(tmp_path: Path) -> None:
    async with operator(tmp_path) as cluster:
        await put(cluster, Kind.MODEL, "m", source={"uri": "pypi://m@1"}, pool="cpu")
        await until(cluster, Kind.MODEL, "m", has("Scheduled", "False", "PoolNotFound"))
        await pool_and_model(cluster)
        await until(cluster, Kind.INSTANCE, "cpu-node1-0", lists("m"))
        await until(cluster, Kind.MODEL, "m", has("Scheduled", "True"))
        await report_open(cluster)
        await until(cluster, Kind.MODEL, "m", has("Ready", "True"))
        await until(cluster, Kind.POOL, "cpu", has("Ready", "True"))
    # The operator has ended, so what it had to tell is told.
    notes = [(n["name"], n["reason"]) for n in await cluster.notes() if n["kind"] == "Model"]
    assert notes == [("default/m", "PoolNotFound"), ("default/m", "Placed"), ("default/m", "Ready")]


async def test_deleting_a_model_and_then_its_pool_removes_what_was_made(tmp_path: Path) -> None:
    async with operator(tmp_path) as cluster:
        await pool_and_model(cluster)
        await until(cluster, Kind.INSTANCE, "cpu-node1-0", lists("m"))
        await cluster.delete(Kind.MODEL, NamespacedName("default", "m"))
        await until(cluster, Kind.INSTANCE, "cpu-node1-0", lists())
        await cluster.delete(Kind.POOL, NamespacedName("default", "cpu"))
        await until(cluster, Kind.INSTANCE, "cpu-node1-0", lambda resource: resource is None)


async def test_a_refused_write_holds_up_no_other_and_is_tried_again(tmp_path: Path) -> None:
    async with operator(tmp_path) as cluster:
        cluster.refuse["cpu"] = 2
        await pool_and_model(cluster)
        await until(cluster, Kind.MODEL, "m", has("Scheduled", "True"))
        await until(cluster, Kind.POOL, "cpu", has("Ready", "False", "AgentSilent"))
        assert cluster.refuse["cpu"] == 0


async def test_a_status_that_somebody_damaged_is_written_again(tmp_path: Path) -> None:
    async with operator(tmp_path, resync=0.5) as cluster:
        await pool_and_model(cluster)
        await until(cluster, Kind.MODEL, "m", has("Scheduled", "True"))
        await cluster.patch_status(Kind.MODEL, NamespacedName("default", "m"), {})
        await until(cluster, Kind.MODEL, "m", has("Scheduled", "True"))


async def test_a_world_at_rest_is_left_alone_and_a_new_run_goes_on_from_objects(tmp_path: Path) -> None:
    async with operator(tmp_path) as cluster:
        await pool_and_model(cluster)
        await until(cluster, Kind.INSTANCE, "cpu-node1-0", lists("m"))
        await report_open(cluster)
        await until(cluster, Kind.MODEL, "m", has("Ready", "True"))
        await until(cluster, Kind.POOL, "cpu", has("Ready", "True"))
    versions = {(k, r["metadata"]["name"]): r["metadata"]["resourceVersion"] for k in Kind for r in await cluster.list(k)}
    async with operator(tmp_path, resync=0.2) as again:
        await asyncio.sleep(1.5)  # real time: nothing is waited for but that nothing happens
        assert again.n_writes == 0
        now = {(k, r["metadata"]["name"]): r["metadata"]["resourceVersion"] for k in Kind for r in await again.list(k)}
        assert now == versions
