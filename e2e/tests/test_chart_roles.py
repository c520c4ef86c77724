"""Each component runs with exactly the rights that the chart gives it, in a namespace that is not `default`, and has no other."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from itertools import product
from pathlib import Path
from typing import Final

import pytest
import yaml

from aerostat_core.errors import PermanentError
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_runtime.cluster import open_cluster
from aerostat_runtime.cluster.port import Change, Cluster, Kind, Note
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.chart import CHART, Chart
from aerostat_testing.kubernetes.installed import Installed, install
from aerostat_testing.kubernetes.operators import OperatorProcess, objects
from aerostat_testing.rule_cases import FULL, changed
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.cluster
QUICKSTART: Final = CHART.parents[1] / "crds/samples/quickstart"
HERE, THERE, ELSEWHERE = "node-here", "node-there", "node-elsewhere"
READ: Final = {"list", "watch"}
EVENTS: Final = {"events.events.k8s.io": {"create", "get", "patch"}}

# What each component may do in a namespace that is watched, beyond what every account may.
MAY: Final[dict[str, dict[str, set[str]]]] = {
    "operator": {
        "models.aerostat.dev": READ | {"get"},
        "pools.aerostat.dev": READ | {"get"},
        "slos.aerostat.dev": READ | {"get"},
        "models.aerostat.dev/status": {"patch"},
        "pools.aerostat.dev/status": {"patch"},
        "slos.aerostat.dev/status": {"patch"},
        "pools.aerostat.dev/finalizers": {"update"},
        "instances.aerostat.dev": READ | {"create", "patch", "delete"},
        **EVENTS,
    },
    "router": {f"{plural}.aerostat.dev": READ for plural in ("models", "pools", "slos", "instances")},
    "agent": {"instances.aerostat.dev": READ | {"get"}, "instances.aerostat.dev/status": {"patch"}, **EVENTS},
    "engines": {},
}
SECRETS: Final = {"ca": "operator", "router-tls": "router", "agent-tls": "agent", "engines-tls": "engines"}  # and who has one beside it
LEASE: Final = {"leases.coordination.k8s.io": {"create"}, "leases.coordination.k8s.io:aerostat-operator": {"get", "update"}}
EVERYWHERE: Final[dict[str, dict[str, set[str]]]] = {"operator": {"nodes": READ}, "router": {}, "agent": {}, "engines": {}}


@pytest.fixture(scope="module", params=[False, True], ids=["all-namespaces", "one-namespace"])
def installed(request: pytest.FixtureRequest, chart: Chart, apiserver: ApiServer) -> Iterator[Installed]:
    made = install(chart, apiserver, HERE, THERE, one_namespace=request.param)
    apiserver.kubectl("apply", "--server-side", f"--namespace={made.watched}", "--filename", str(QUICKSTART))
    for node in (HERE, THERE):
        apiserver.kubectl("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump(instance(made.watched, node)))
    yield made
    apiserver.clear()
    for node in (HERE, THERE):  # other tests of this server count nodes
        apiserver.delete(f"/api/v1/nodes/{node}")


@pytest.fixture(params=[False, True], ids=["all-namespaces", "one-namespace"])
def reading(request: pytest.FixtureRequest, chart: Chart, apiserver: ApiServer) -> Iterator[Installed]:
    """An installation that reads the Secrets of the namespace that is watched, on a node of its own."""
    yield install(chart, apiserver, ELSEWHERE, one_namespace=request.param, reads_secrets=True)
    apiserver.delete(f"/api/v1/nodes/{ELSEWHERE}")


def instance(namespace: str, node: str) -> Resource:
    name = {"metadata.name": f"on-{node}", "metadata.namespace": namespace}
    return changed(FULL[Kind.INSTANCE], {**name, "spec.node": node})


async def present(cluster: Cluster, kind: Kind) -> set[str]:
    """What a watch tells at its beginning."""
    names: set[str] = set()
    async with asyncio.timeout(20), aclosing(cluster.watch(kind)) as events:  # type: ignore[type-var]
        async for event in events:
            if event.change is Change.SYNCED:
                return names
            assert event.resource is not None
            names.add(event.resource["metadata"]["name"])
    raise AssertionError("the watch ended")


def rights(installed: Installed, component: str, namespace: str) -> dict[str, set[str]]:
    """Verbs by resource, as the server lists them to the account itself. A right over one object has its name behind `:`."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    command = ("create", "--raw=/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", "--filename=-")
    told = json.loads(installed.server.kubectl(*command, stdin=json.dumps(review), kubeconfig=installed.kubeconfig(component)))["status"]
    assert told["incomplete"] is False
    found: dict[str, set[str]] = {}
    for rule in told["resourceRules"]:
        for group, resource, name in product(rule["apiGroups"], rule["resources"], rule.get("resourceNames", [""])):
            plural, _, subresource = resource.partition("/")
            title = ".".join(filter(None, (plural, group))) + f"/{subresource}" * bool(subresource) + f":{name}" * bool(name)
            found.setdefault(title, set()).update(rule["verbs"])
    return found


def of_its_own(installed: Installed, component: str, namespace: str) -> dict[str, set[str]]:
    """The rights of that account beyond those of one that was given none."""
    everybody = rights(installed, "engines", namespace)
    return {name: verbs for name, verbs in rights(installed, component, namespace).items() if name not in everybody}


def certificates(installed: Installed, namespace: str) -> dict[str, set[str]]:
    """What the operator may do with Secrets: those of the chart, each by its name."""
    there = (secret for secret, component in SECRETS.items() if installed.account(component).namespace == namespace)
    return {f"secrets:aerostat-{secret}": {"get", "patch"} for secret in there}


@pytest.mark.parametrize("component", list(MAY))
def test_it_may_do_exactly_what_it_does(installed: Installed, component: str) -> None:
    everybody = rights(installed, "engines", installed.watched)  # who has no rights of its own
    assert not any("aerostat" in name or name in ("secrets", "nodes", "pods") for name in everybody)
    outside = (MAY[component] if installed.is_wide else {}) | EVERYWHERE[component]
    is_operator = component == "operator"
    lease = LEASE if is_operator else {}
    assert of_its_own(installed, component, installed.watched) == MAY[component] | EVERYWHERE[component]
    assert of_its_own(installed, component, installed.elsewhere) == outside
    for namespace in {installed.namespace, installed.nodes}:
        secrets = certificates(installed, namespace) if is_operator else {}
        own = lease if namespace == installed.namespace else {}
        assert of_its_own(installed, component, namespace) == outside | own | secrets


async def test_agents_read_the_secrets_of_namespaces_that_are_named_and_of_no_others(reading: Installed) -> None:
    namespaces = {reading.watched, reading.elsewhere, reading.namespace, reading.nodes}
    for component, namespace in product(MAY, namespaces):
        may_read = (component, namespace) == ("agent", reading.watched)
        assert of_its_own(reading, component, namespace).get("secrets") == ({"get"} if may_read else None)
    for namespace in namespaces:
        content = {"metadata": {"name": "hub"}, "stringData": {"token": f"hf_{namespace}"}}
        reading.server.call("POST", f"/api/v1/namespaces/{namespace}/secrets", content)
    agent = open_cluster(reading.cluster_url("agent", node=ELSEWHERE))
    try:
        assert await agent.secret(NamespacedName(reading.watched, "hub")) == {"token": f"hf_{reading.watched}".encode()}
        for namespace in namespaces - {reading.watched}:
            with pytest.raises(PermanentError, match=f'add "{namespace}" to modelSecrets.namespaces'):
                await agent.secret(NamespacedName(namespace, "hub"))
    finally:
        await agent.close()


async def test_the_router_reads_what_is_declared_and_writes_nothing(installed: Installed) -> None:
    async with installed.cluster("router") as cluster:
        assert await present(cluster, Kind.MODEL) == {"assistant", "coder"}
        for kind in (Kind.POOL, Kind.SLO, Kind.INSTANCE):
            assert await present(cluster, kind)
        for forbidden in (
            cluster.list(Kind.NODE),
            cluster.apply(instance(installed.watched, HERE)),
            cluster.patch_status(Kind.INSTANCE, NamespacedName(installed.watched, f"on-{HERE}"), {}),
            cluster.delete(Kind.MODEL, NamespacedName(installed.watched, "coder")),
        ):
            with pytest.raises(PermanentError, match="may not"):
                await forbidden


async def test_an_agent_reports_on_its_own_node_only(installed: Installed) -> None:
    status = {"agentEpoch": 7}
    mine, other = (NamespacedName(installed.watched, f"on-{node}") for node in (HERE, THERE))
    async with installed.cluster("agent", node=HERE) as cluster:
        assert {mine.name, other.name} <= await present(cluster, Kind.INSTANCE)
        assert await cluster.patch_status(Kind.INSTANCE, mine, status)
        await cluster.note(Note(kind=Kind.INSTANCE, name=mine, reason="Opened", message="model coder takes traffic"))
        with pytest.raises(PermanentError, match=f'this agent is on node "{HERE}" and reports on Instances of that node only') as caught:
            await cluster.patch_status(Kind.INSTANCE, other, status)
        assert "Role" not in str(caught.value), "no right would help"
        for forbidden in (
            cluster.list(Kind.MODEL),
            cluster.list(Kind.NODE),
            cluster.apply(instance(installed.watched, HERE)),
            cluster.delete(Kind.INSTANCE, mine),
            cluster.patch_status(Kind.MODEL, NamespacedName(installed.watched, "coder"), {}),
        ):
            with pytest.raises(PermanentError, match="may not"):
                await forbidden
    seen = objects(installed.server, installed.watched, "instances")
    assert seen[mine.name]["status"] == status
    assert "status" not in seen[other.name]
    told = installed.server.call("GET", f"/apis/events.k8s.io/v1/namespaces/{installed.watched}/events")["items"]
    assert ("Opened", mine.name) in {(event["reason"], event["regarding"]["name"]) for event in told}


async def test_an_agents_account_without_a_node_reports_nothing(installed: Installed) -> None:
    """A token that was asked for by hand, not the one of a pod."""
    async with installed.cluster("agent") as cluster:
        with pytest.raises(PermanentError, match='this agent is on node ""'):
            await cluster.patch_status(Kind.INSTANCE, NamespacedName(installed.watched, f"on-{HERE}"), {"agentEpoch": 9})


async def test_the_policy_is_about_agents_only(installed: Installed) -> None:
    installed.server.call(
        "PATCH",
        f"/apis/aerostat.dev/v1alpha1/namespaces/{installed.watched}/instances/on-{THERE}/status",
        {"status": {}},
        content_type="application/merge-patch+json",
    )


async def test_the_operators_calls_work_and_no_others(installed: Installed) -> None:
    name = NamespacedName(installed.watched, "made-by-operator")
    pool = installed.server.call("GET", f"/apis/aerostat.dev/v1alpha1/namespaces/{installed.watched}/pools/cpu")
    owner = {"apiVersion": "aerostat.dev/v1alpha1", "kind": "Pool", "name": "cpu", "uid": pool["metadata"]["uid"]}
    reference = owner | {"controller": True, "blockOwnerDeletion": True}
    made = changed(instance(installed.watched, HERE), {"metadata.name": name.name, "metadata.ownerReferences": [reference]})
    async with installed.cluster("operator") as cluster:
        for kind in Kind:
            assert await present(cluster, kind)
        await cluster.apply(made)
        await cluster.apply(changed(made, {"spec.draining": True}))
        await cluster.delete(Kind.INSTANCE, name)
        for kind, own in ((Kind.MODEL, "coder"), (Kind.POOL, "cpu"), (Kind.SLO, "interactive")):
            assert await cluster.patch_status(kind, NamespacedName(installed.watched, own), {"observedGeneration": 1})
        await cluster.note(Note(kind=Kind.POOL, name=NamespacedName(installed.watched, "cpu"), reason="Placed", message="by a test"))
        for forbidden in (
            cluster.apply(changed(FULL[Kind.SLO], {"metadata.namespace": installed.watched})),
            cluster.delete(Kind.MODEL, NamespacedName(installed.watched, "coder")),
            cluster.patch_status(Kind.INSTANCE, NamespacedName(installed.watched, f"on-{HERE}"), {}),
        ):
            with pytest.raises(PermanentError, match="may not"):
                await forbidden


async def test_the_operator_runs_with_them(installed: Installed, tmp_path: Path) -> None:
    """The whole process, its Lease included: it makes the quickstart's Instance."""
    log = tmp_path / "operator.log"
    kubeconfig = installed.kubeconfig("operator")
    with OperatorProcess(
        installed.server,
        installed.watched,
        log,
        kubeconfig=kubeconfig,
        everywhere=installed.is_wide,
        lease=f"{installed.namespace}/aerostat-operator",
    ).leading():

        def has_placed() -> bool:
            found = objects(installed.server, installed.watched, "instances")
            return any(m["name"] == "coder" for i in found.values() for m in i["spec"].get("models", ()))

        wait_for(has_placed, "the operator places the models", limit=30.0)
    assert "orbidden" not in log.read_text()
