"""The Kubernetes adapter against a real API server: outages, expired versions, rights, several writers, events."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_asyncio.config import incluster_config

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.cluster import kubernetes_connection, kubernetes_watch, open_cluster
from aerostat_runtime.cluster.kubernetes_errors import NotFoundError, RefusedError
from aerostat_runtime.cluster.port import Adapter, Change, Cluster, InvalidResourceError, Kind, Note, WatchEvent
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.relay import relay_to
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cluster

DEADLINE = 60.0


@asynccontextmanager
async def opened(kubeconfig: Path, *, namespace: str | None = None, manager: str = "aerostat") -> AsyncIterator[Adapter]:
    scope = f"&namespace={namespace}" if namespace else ""
    cluster = open_cluster(f"kubernetes:?kubeconfig={kubeconfig}{scope}", manager=manager)
    try:
        yield cluster
    finally:
        await cluster.close()


def slo(namespace: str, name: str = "a", *, ttft: str = "1s", **metadata: Any) -> Resource:
    return {
        "apiVersion": "aerostat.dev/v1alpha1",
        "kind": "SLO",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {"ttft": ttft, "tpot": "100ms"},
    }


@asynccontextmanager
async def following(cluster: Cluster, kind: Kind = Kind.SLO) -> AsyncIterator[list[WatchEvent]]:
    """The events of a watch, which is synced."""
    events: list[WatchEvent] = []
    synced = asyncio.Event()

    async def follow() -> None:
        async with aclosing(cluster.watch(kind)) as watch:  # type: ignore[type-var]
            async for event in watch:
                events.append(event)
                if event.change is Change.SYNCED:
                    synced.set()

    task = asyncio.create_task(follow())
    try:
        async with asyncio.timeout(DEADLINE):
            await synced.wait()
        yield events
    finally:
        task.cancel()
        await asyncio.wait({task})


def changes(events: list[WatchEvent]) -> list[tuple[Change, str]]:
    return [(event.change, event.resource["metadata"]["name"]) for event in events if event.resource]


async def until(probe: Callable[[], object]) -> None:
    await eventually(probe, "the events that the test waits for", limit=DEADLINE)


async def restarted(apiserver: ApiServer) -> None:
    apiserver.spawn()
    await apiserver.ready()


async def test_a_watch_outlives_a_killed_server_and_misses_nothing(apiserver: ApiServer, namespace: str) -> None:
    async with opened(apiserver.kubeconfig(), namespace=namespace) as reader, opened(apiserver.kubeconfig()) as writer:
        await writer.apply(slo(namespace, "goes"))
        await writer.apply(slo(namespace, "stays"))
        async with following(reader) as events:
            apiserver.kill()
            late = asyncio.create_task(writer.apply(slo(namespace, "comes")))  # waits for the server
            await asyncio.sleep(0.3)
            await restarted(apiserver)
            await late
            await writer.delete(Kind.SLO, NamespacedName(namespace, "goes"))
            await until(lambda: len(changes(events)) >= 4)
        assert sorted(changes(events)) == [
            (Change.ADDED, "comes"),
            (Change.ADDED, "goes"),
            (Change.ADDED, "stays"),
            (Change.DELETED, "goes"),
        ]


async def test_a_version_that_a_new_server_does_not_know_is_made_up_for_by_a_list(apiserver: ApiServer, namespace: str) -> None:
    async with (
        relay_to(apiserver.port) as relay,
        opened(apiserver.kubeconfig(server=f"https://127.0.0.1:{relay.port}"), namespace=namespace) as reader,
        opened(apiserver.kubeconfig()) as writer,
    ):
        for name in ("changes", "goes", "made-anew", "stays"):
            await writer.apply(slo(namespace, name))
        async with following(reader) as events:
            relay.cut()
            await writer.apply(slo(namespace, "changes", ttft="2s"))
            for name in ("goes", "made-anew"):
                await writer.delete(Kind.SLO, NamespacedName(namespace, name))
            await writer.apply(slo(namespace, "made-anew"))
            apiserver.stop()  # the cache of a new server begins here: what was before has expired
            await restarted(apiserver)
            await writer.apply(slo(namespace, "new"))
            relay.mend()
            await until(lambda: (Change.ADDED, "new") in changes(events))
        assert changes(events)[4:] == [
            (Change.DELETED, "goes"),
            (Change.DELETED, "made-anew"),
            (Change.MODIFIED, "changes"),
            (Change.ADDED, "made-anew"),
            (Change.ADDED, "new"),
        ]


async def test_a_cut_connection_is_resumed_without_a_list(apiserver: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = 0
    real = kubernetes_watch.list_all

    async def counted(*args: Any, **kwargs: Any) -> tuple[list[Resource], str]:
        nonlocal lists
        lists += 1
        return await real(*args, **kwargs)

    monkeypatch.setattr(kubernetes_watch, "list_all", counted)
    async with (
        relay_to(apiserver.port) as relay,
        opened(apiserver.kubeconfig(server=f"https://127.0.0.1:{relay.port}"), namespace=namespace) as reader,
        opened(apiserver.kubeconfig()) as writer,
        following(reader) as events,
    ):
        for i in range(3):
            await until(lambda: len(changes(events)) == i)  # noqa: B023
            relay.cut()
            await writer.apply(slo(namespace, f"n{i}"))
            relay.mend()
        await until(lambda: len(changes(events)) == 3)
        assert lists == 1


async def test_a_server_that_hangs_bounds_a_call_and_a_watch_goes_on_after(
    apiserver: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_connection, "REQUEST_LIMIT", 1.0)
    monkeypatch.setattr(kubernetes_connection, "CALL_LIMIT", 2.0)
    async with opened(apiserver.kubeconfig(), namespace=namespace) as cluster, following(cluster) as events:
        apiserver.hang()
        try:
            began = time.monotonic()
            with pytest.raises(TemporaryError, match="cannot patch slos"):
                await cluster.apply(slo(namespace))
            await cluster.note(Note(kind=Kind.SLO, name=NamespacedName(namespace, "a"), reason="Lost", message="nobody hears it"))
            assert time.monotonic() - began < 12
        finally:
            apiserver.resume()
        monkeypatch.setattr(kubernetes_connection, "REQUEST_LIMIT", 10.0)
        monkeypatch.setattr(kubernetes_connection, "CALL_LIMIT", 20.0)
        await cluster.apply(slo(namespace, "after"))
        await until(lambda: (Change.ADDED, "after") in changes(events))


async def test_close_does_not_wait_for_a_server_that_hangs(apiserver: ApiServer, namespace: str) -> None:
    async with opened(apiserver.kubeconfig(), namespace=namespace) as cluster, following(cluster):
        apiserver.hang()
        try:
            began = time.monotonic()
            await cluster.close()
            assert time.monotonic() - began < 2
        finally:
            apiserver.resume()


async def test_what_a_role_does_not_allow_is_told_by_verb_and_resource(apiserver: ApiServer, namespace: str) -> None:
    rules = [{"apiGroups": ["aerostat.dev"], "resources": ["slos"], "verbs": ["list", "watch"]}]
    kubeconfig = apiserver.kubeconfig_for(NamespacedName(namespace, "reader"), rules)
    calls: list[tuple[Callable[[Cluster], Awaitable[object]], str]] = [
        (lambda c: c.apply(slo(namespace)), "may not patch slos"),
        (lambda c: c.patch_status(Kind.SLO, NamespacedName(namespace, "a"), {}), "may not patch slos/status"),
        (lambda c: c.delete(Kind.SLO, NamespacedName(namespace, "a")), "may not delete slos"),
        (lambda c: c.list(Kind.MODEL), "may not list models"),
        (lambda c: anext(aiter(c.watch(Kind.NODE))), "may not list nodes"),
    ]
    async with opened(kubeconfig) as cluster, following(cluster):
        assert await cluster.list(Kind.SLO) is not None
        for call, said in calls:
            with pytest.raises(RefusedError, match=said) as caught:
                await call(cluster)
            assert caught.value.reason == "Forbidden"
            assert f"system:serviceaccount:{namespace}:reader" in caught.value.message
            assert "Role must allow it" in caught.value.message
        await cluster.note(Note(kind=Kind.SLO, name=NamespacedName(namespace, "a"), reason="Dropped", message="best effort"))


async def test_a_secret_is_read_as_it_is_now(apiserver: ApiServer, namespace: str) -> None:
    name = NamespacedName(namespace, "hub")
    path = f"/api/v1/namespaces/{namespace}/secrets"
    async with opened(apiserver.kubeconfig()) as cluster:
        with pytest.raises(PermanentError, match=f'there is no Secret "hub" in namespace "{namespace}": create it'):
            await cluster.secret(name)
        apiserver.call("POST", path, {"metadata": {"name": "hub"}, "stringData": {"token": "a"}})
        assert await cluster.secret(name) == {"token": b"a"}
        apiserver.call("PATCH", f"{path}/hub", {"data": {"token": "gIE="}}, content_type="application/merge-patch+json")
        assert await cluster.secret(name) == {"token": b"\x80\x81"}
        with pytest.raises(PermanentError):
            await cluster.secret(NamespacedName("default", f"../../{namespace}/secrets/hub"))
    async with opened(apiserver.kubeconfig_for(NamespacedName(namespace, "nobody"), [])) as cluster:
        with pytest.raises(PermanentError, match=f'add "{namespace}" to modelSecrets.namespaces'):
            await cluster.secret(name)


async def test_a_pod_is_its_service_account(apiserver: ApiServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [{"apiGroups": ["aerostat.dev"], "resources": ["slos"], "verbs": ["list"]}]
    config = yaml.safe_load(apiserver.kubeconfig_for(NamespacedName(namespace, "pod"), rules).read_text())
    (tmp_path / "token").write_text(config["users"][0]["user"]["token"])
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", config["clusters"][0]["cluster"]["certificate-authority"])
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(apiserver.port))
    cluster = open_cluster(f"kubernetes:?namespace={namespace}")
    try:
        assert await cluster.list(Kind.SLO) == []
        with pytest.raises(RefusedError, match=f"system:serviceaccount:{namespace}:pod"):
            await cluster.list(Kind.MODEL)
    finally:
        await cluster.close()


async def test_each_manager_owns_what_it_applies(apiserver: ApiServer, namespace: str) -> None:
    kubeconfig = apiserver.kubeconfig()
    async with opened(kubeconfig, manager="first") as first, opened(kubeconfig, manager="second") as second:
        await first.apply(slo(namespace, labels={"of": "first", "shared": "1"}))
        both = await second.apply(slo(namespace, labels={"of-second": "yes", "shared": "2"}))
        assert both["metadata"]["labels"] == {"of": "first", "of-second": "yes", "shared": "2"}
        left = await second.apply(slo(namespace))
        assert left["metadata"]["labels"] == {"of": "first"}


async def test_many_writers_of_one_object_all_get_through(apiserver: ApiServer, namespace: str) -> None:
    kubeconfig = apiserver.kubeconfig()
    async with opened(kubeconfig, manager="first") as first, opened(kubeconfig, manager="second") as second:
        name = name_of(await first.apply(slo(namespace)))
        writes = [
            *(first.apply(slo(namespace, ttft=f"{i}s")) for i in range(1, 16)),
            *(second.apply(slo(namespace, annotations={"n": str(i)})) for i in range(15)),
            *(cluster.patch_status(Kind.SLO, name, {"models": i}) for i in range(15) for cluster in (first, second)),
        ]
        results = await asyncio.gather(*writes)
        assert all(results)
        (last,) = [r for r in await first.list(Kind.SLO) if name_of(r) == name]
        assert last["status"]["models"] in range(15)


async def test_a_namespace_is_a_scope(apiserver: ApiServer, namespace: str) -> None:
    other = apiserver.create_namespace()
    async with opened(apiserver.kubeconfig(), namespace=namespace) as scoped, opened(apiserver.kubeconfig()) as whole:
        async with following(scoped) as events:
            await whole.apply(slo(other, "elsewhere"))
            here = slo(namespace, "here")
            del here["metadata"]["namespace"]
            made = await scoped.apply(here)
            assert made["metadata"]["namespace"] == namespace
            await until(lambda: changes(events))
        assert changes(events) == [(Change.ADDED, "here")]
        assert [name_of(r) for r in await scoped.list(Kind.SLO)] == [NamespacedName(namespace, "here")]
        assert {NamespacedName(namespace, "here"), NamespacedName(other, "elsewhere")} <= {name_of(r) for r in await whole.list(Kind.SLO)}
        with pytest.raises(NotFoundError, match="no-such-namespace"):
            await whole.apply(slo("no-such-namespace"))


async def test_nodes_are_read_and_never_written(apiserver: ApiServer, namespace: str) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"node-{namespace}", "labels": {"gpu": "yes"}}}
    async with opened(apiserver.kubeconfig(), namespace=namespace) as cluster, following(cluster, Kind.NODE) as events:
        apiserver.call("POST", "/api/v1/nodes", node)
        await until(lambda: (Change.ADDED, f"node-{namespace}") in changes(events))
        (seen,) = [n for n in await cluster.list(Kind.NODE) if n["metadata"]["name"] == f"node-{namespace}"]
        assert (seen["kind"], seen["apiVersion"], seen["metadata"]["labels"]["gpu"]) == ("Node", "v1", "yes")
        for write in (cluster.apply(node), cluster.delete(Kind.NODE, name_of(node)), cluster.patch_status(Kind.NODE, name_of(node), {})):
            with pytest.raises(PermanentError, match="only read"):
                await write


async def test_a_long_list_is_read_in_pages(apiserver: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "PAGE", 3)
    async with opened(apiserver.kubeconfig(), namespace=namespace) as cluster:
        await asyncio.gather(*(cluster.apply(slo(namespace, f"n{i}")) for i in range(8)))
        assert [r["metadata"]["name"] for r in await cluster.list(Kind.SLO)] == [f"n{i}" for i in range(8)]
        async with following(cluster) as events:
            assert len(changes(events)) == 8


async def test_events_are_told_once_and_counted(apiserver: ApiServer, namespace: str) -> None:
    name = NamespacedName(namespace, "a")
    note = Note(kind=Kind.SLO, name=name, reason="Missed", message="p95 is 3 s, target 1 s " + "é" * 2000, warning=True)
    async with opened(apiserver.kubeconfig(), manager="aerostat-operator") as cluster:
        await cluster.apply(slo(namespace))
        for _ in range(5):
            await cluster.note(note)
    async with opened(apiserver.kubeconfig(), manager="aerostat-operator") as restarted_component:
        await restarted_component.note(note)
        await restarted_component.note(Note(kind=Kind.SLO, name=name, reason="Met", message="p95 is 0.5 s"))
    events = apiserver.call("GET", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")["items"]
    assert len(events) == 2
    missed, met = next(e for e in events if e["reason"] == "Missed"), next(e for e in events if e["reason"] == "Met")
    assert (missed["type"], missed["series"]["count"], len(missed["note"].encode())) == ("Warning", 2, 1024)
    assert (met["type"], met.get("series")) == ("Normal", None)
    described = apiserver.kubectl("describe", "slo", "a", "--namespace", namespace)
    assert "p95 is 0.5 s" in described
    assert "aerostat.dev/aerostat-operator" in described


async def test_what_is_refused_is_told_in_the_servers_words_and_by_field(apiserver: ApiServer, namespace: str) -> None:
    async with opened(apiserver.kubeconfig()) as cluster:
        for spec, said in (
            ({"ttft": "0s"}, "must be more than 0 and at most 10m"),
            ({"ttft": 5}, "must be of type string"),
            ({"unheardOf": 1}, 'unknown field "spec.unheardOf"'),
        ):
            for _ in ("absent", "present"):
                bad = slo(namespace, "bad")
                bad["spec"] |= spec
                with pytest.raises(InvalidResourceError, match=said):
                    await cluster.apply(bad)
                await cluster.apply(slo(namespace, "bad"))
            await cluster.delete(Kind.SLO, NamespacedName(namespace, "bad"))
        with pytest.raises(InvalidResourceError) as caught:
            await cluster.apply(slo(namespace, ttft="0s"))
        assert [v.path for v in caught.value.violations] == ["spec.ttft"]
