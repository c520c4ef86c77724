"""Certificates between parts over a real API server: the operator, with the chart's rights, in Secrets that the real helm makes."""

import base64
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.peers import AGENT, ENGINES, ROUTER
from aerostat_operator.policy.certificates import LEAF_LIFE, Leaf
from aerostat_operator.secret_store import Edit, KubernetesSecrets
from aerostat_operator.x509 import read_authorities, read_bundle, read_leaf
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster.kubernetes_connection import Connection, Target
from aerostat_runtime.tls import AUTHORITIES, CERTIFICATE, KEY
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.chart import CHART, Chart
from aerostat_testing.kubernetes.installed import Installed, install
from aerostat_testing.kubernetes.operators import MERGE, OperatorProcess
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.cluster
LIMIT: Final[Seconds] = 30.0
NODE: Final = "node-with-tls"
PARTS: Final = {"router": ROUTER, "agent": AGENT, "engines": ENGINES}

Start = Callable[[], OperatorProcess]


@pytest.fixture
def installed(apiserver: ApiServer, chart: Chart) -> Iterator[Installed]:
    """The node pods in a namespace of their own."""
    yield install(chart, apiserver, NODE, one_namespace=True)
    apiserver.delete(f"/api/v1/nodes/{NODE}")


@pytest.fixture
def start(installed: Installed, tmp_path: Path) -> Start:
    """Starts one more operator, as the chart says it."""
    count = iter(range(10))
    given = [a for a in installed.container("operator")["args"] if a.startswith("--tls-secrets=")]

    def started() -> OperatorProcess:
        return OperatorProcess(
            installed.server,
            installed.watched,
            tmp_path / f"operator-{next(count)}.log",
            kubeconfig=installed.kubeconfig("operator"),
            lease=f"{installed.namespace}/aerostat-operator",
            arguments=given,
        )

    return started


def path(name: NamespacedName) -> str:
    return f"/api/v1/namespaces/{name.namespace}/secrets/{name.name}"


def secret(server: ApiServer, name: NamespacedName) -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in (server.call("GET", path(name)).get("data") or {}).items()}


def is_whole(server: ApiServer, namespace: str, nodes: str) -> bool:
    """Every part has a certificate for its name by a CA that all trust."""
    authorities, damaged = read_authorities(secret(server, NamespacedName(namespace, "aerostat-ca")))
    assert not damaged
    now = SystemClock().wall()
    for part, name in PARTS.items():
        data = secret(server, NamespacedName(namespace if part == "router" else nodes, f"aerostat-{part}-tls"))
        leaf = read_leaf(data, authorities)
        if not isinstance(leaf, Leaf):
            return False
        assert data.keys() == {CERTIFICATE, KEY, AUTHORITIES}
        assert read_bundle(data) == {a.id for a in authorities}
        assert leaf.issuer in read_bundle(data)
        assert leaf.names == {name}
        assert 0 < leaf.validity.until - now <= LEAF_LIFE
    return True


def filled(installed: Installed) -> Callable[[], bool]:
    return lambda: is_whole(installed.server, installed.namespace, installed.nodes)


def test_the_leader_fills_empty_secrets_and_the_next_leader_refills_what_somebody_emptied(installed: Installed, start: Start) -> None:
    server = installed.server
    router = NamespacedName(installed.namespace, "aerostat-router-tls")
    engines = NamespacedName(installed.nodes, "aerostat-engines-tls")
    with start().leading() as first, start().ready() as second:
        wait_for(filled(installed), "all Secrets are filled", limit=LIMIT)
        wait_for(lambda: first.metric("aerostat_certificate_remaining_seconds"), "a check is told", limit=LIMIT)
        assert first.metric("aerostat_certificates_made_total") == 4
        assert first.metric("aerostat_certificate_errors_total") == 0
        assert second.metric("aerostat_certificates_made_total") == second.metric("aerostat_certificate_remaining_seconds") == 0
        assert not second.is_leading()
        before = secret(server, router)
        server.call("PATCH", path(engines), {"data": None}, content_type=MERGE)
        assert first.stop() == 0
        second.leading()
        wait_for(filled(installed), "the emptied Secret is filled again", limit=LIMIT)
        wait_for(lambda: second.metric("aerostat_certificates_made_total") == 1, "only that one was made anew", limit=LIMIT)
        assert secret(server, router) == before
        managers = {
            field["manager"] for field in server.call("GET", path(engines))["metadata"]["managedFields"] if "f:data" in field["fieldsV1"]
        }
        assert managers == {"aerostat-operator"}
        for log in (first.log, second.log):
            assert "PRIVATE KEY" not in log.read_text()
            assert "orbidden" not in log.read_text()


def test_a_secret_that_is_gone_is_told_and_holds_up_neither_the_others_nor_the_operator(installed: Installed, start: Start) -> None:
    installed.server.delete(path(NamespacedName(installed.nodes, "aerostat-agent-tls")))
    with start().leading() as operator:
        router = NamespacedName(installed.namespace, "aerostat-router-tls")
        wait_for(lambda: secret(installed.server, router), "the router's is filled", limit=LIMIT)
        wait_for(lambda: operator.metric("aerostat_certificate_errors_total"), "the failure is counted", limit=LIMIT)
        assert operator.get("/healthz") == operator.get("/readyz") == "ok\n"
        assert f"there is no Secret {installed.nodes}/aerostat-agent-tls: the chart makes it" in operator.log.read_text()


async def test_no_other_secret_may_be_read_or_written_nor_any_listed(installed: Installed) -> None:
    server, other = installed.server, NamespacedName(installed.namespace, "somebody-elses")
    server.call("POST", f"/api/v1/namespaces/{other.namespace}/secrets", {"metadata": {"name": other.name}, "stringData": {"a": "b"}})
    api = Connection(Target(kubeconfig=installed.kubeconfig("operator")), user_agent="tests")
    store = KubernetesSecrets(api, manager="aerostat-operator")
    try:
        for refused in (store.read(other), store.change(other, Edit(data={"a": None}), version="1")):
            with pytest.raises(PermanentError, match="may not"):
                await refused
        ours = NamespacedName(installed.nodes, "aerostat-agent-tls")
        assert (await store.read(ours)).data == {}
    finally:
        await api.close()
    for verb in ("list", "watch", "create", "delete", "update"):
        command = ("auth", "can-i", verb, "secrets/aerostat-ca", f"--namespace={installed.namespace}")
        with pytest.raises(subprocess.CalledProcessError) as refusal:
            server.kubectl(*command, kubeconfig=installed.kubeconfig("operator"))
        assert refusal.value.stdout == "no\n"


async def test_of_two_writers_the_one_that_read_an_older_version_is_refused(installed: Installed) -> None:
    name = NamespacedName(installed.namespace, "aerostat-ca")
    api = Connection(Target(kubeconfig=installed.kubeconfig("operator")), user_agent="tests")
    store = KubernetesSecrets(api, manager="aerostat-operator")
    try:
        version = (await store.read(name)).version
        await store.change(name, Edit(data={"a": b"1", "b": b"2"}, annotations={"aerostat.dev/x": "y"}), version=version)
        with pytest.raises(TemporaryError, match="has been modified"):
            await store.change(name, Edit(data={"a": b"3"}), version=version)
        found = await store.read(name)
        assert (found.data, found.annotations["aerostat.dev/x"]) == ({"a": b"1", "b": b"2"}, "y")
        await store.change(name, Edit(data={"a": None, "never-there": None}), version=found.version)
        assert (await store.read(name)).data == {"b": b"2"}
    finally:
        await api.close()


def test_what_was_filled_stays_over_upgrades_and_rollbacks_of_the_chart(apiserver: ApiServer, chart: Chart, namespace: str) -> None:
    """By the real helm. Its hooks need a cluster that runs Jobs."""
    names = [NamespacedName(namespace, f"aerostat-{name}") for name in ("ca", "router-tls", "agent-tls", "engines-tls")]

    def helm(*command: str) -> None:
        chart.on(apiserver.kubeconfig(), *command, "--no-hooks", f"--namespace={namespace}")

    helm("install", "aerostat", str(CHART), "--skip-crds")
    try:
        for name in names:
            assert secret(apiserver, name) == {}
            body: dict[str, Any] = {"metadata": {"annotations": {"aerostat.dev/trusted-since": "{}"}}, "data": {"k": "djE="}}
            apiserver.call("PATCH", f"{path(name)}?fieldManager=aerostat-operator", body, content_type=MERGE)
        for command in (
            ("upgrade", "aerostat", str(CHART), "--set=router.replicas=3"),
            ("upgrade", "aerostat", str(CHART), "--force-conflicts"),
            ("rollback", "aerostat", "1"),
        ):
            helm(*command)
            for name in names:
                found = apiserver.call("GET", path(name))
                assert found["data"] == {"k": "djE="}, command
                assert found["metadata"]["annotations"]["aerostat.dev/trusted-since"] == "{}"
    finally:
        helm("uninstall", "aerostat")
    for name in names:
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            apiserver.call("GET", path(name))
