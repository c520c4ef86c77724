"""The chart's hook that brings CRDs, on an API server of its own: its rights are enough and no more, and objects lose nothing."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_operator.crds import crds_of_this_release
from aerostat_operator.policy.crds import VERSION_LABEL
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.chart import Chart
from aerostat_testing.kubernetes.operators import API, MERGE

pytestmark = pytest.mark.cluster

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NEWER = {"type": "string", "description": "Of a release that is not this one."}
LIMIT = 60.0


@pytest.fixture(scope="module")
def server(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Without any CRDs: what is done to them must not meet other tests."""
    with ApiServer(tmp_path_factory.mktemp("crds"), apiserver.programs) as fresh:
        yield fresh


@pytest.fixture(scope="module")
def hook(chart: Chart, server: ApiServer) -> list[Resource]:
    """The hook's objects, in the order in which helm makes them, with its rights granted."""
    namespace = server.create_namespace("release")
    objects = [o for o in chart.render(namespace=namespace) if o["metadata"]["labels"]["app.kubernetes.io/component"] == "crds"]
    rights = [o for o in objects if o["kind"] != "Job"]
    server.kubectl("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(rights))
    return objects


@pytest.fixture
def no_crds(server: ApiServer) -> None:
    server.kubectl("delete", "crds", "--all", "--wait", "--timeout=55s")


def run(server: ApiServer, hook: list[Resource], *more: str) -> subprocess.CompletedProcess[str]:
    """The Job's container, as its account."""
    (job,) = (o for o in hook if o["kind"] == "Job")
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    kubeconfig = server.kubeconfig_of(NamespacedName(job["metadata"]["namespace"], spec["serviceAccountName"]))
    command = [sys.executable, *container["command"][1:], *container["args"], f"--cluster=kubernetes:?kubeconfig={kubeconfig}", *more]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT)


def released(release: str, *, add: str = "", drop: str = "") -> Resource:
    """The Pools' CRD as another release has it, with a field of spec more or less."""
    crd = copy.deepcopy(crds_of_this_release()["pools.aerostat.dev"])
    crd["metadata"]["labels"][VERSION_LABEL] = release
    fields: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    if add:
        fields[add] = NEWER
    if drop:
        del fields[drop]
    return crd


def make(server: ApiServer, crd: Resource) -> None:
    """As helm does it with what lies in crds/."""
    server.call("POST", CRDS, crd)
    server.kubectl("wait", "--for=condition=Established", f"crd/{crd['metadata']['name']}", "--timeout=30s")


def pool(**fields: Any) -> Resource:
    spec = {"devices": {"kind": "CPU", "count": 1, "memory": "4Gi"}, **fields}
    return {"apiVersion": "aerostat.dev/v1alpha1", "kind": "Pool", "metadata": {"name": "cpu"}, "spec": spec}


def create(server: ApiServer, resource: Resource) -> Resource:
    namespace = server.create_namespace()
    return server.call("POST", f"{API}/namespaces/{namespace}/pools?fieldValidation=Strict", resource)


def release_of(server: ApiServer, name: str = "pools.aerostat.dev") -> str:
    label: str = server.call("GET", f"{CRDS}/{name}")["metadata"]["labels"][VERSION_LABEL]
    return label


def test_helm_runs_it_before_an_installation_and_an_upgrade_its_rights_first(hook: list[Resource]) -> None:
    assert [o["kind"] for o in hook] == ["ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Job"]
    for o in hook:
        notes = o["metadata"]["annotations"]
        assert notes["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert notes["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
        assert int(notes["helm.sh/hook-weight"]) == (0 if o["kind"] == "Job" else -10)
    (rule,) = hook[1]["rules"]
    assert sorted(rule["resourceNames"]) == sorted(crds_of_this_release())
    assert sorted(rule["verbs"]) == ["create", "get", "patch"]


def test_somebody_else_may_bring_the_crds(chart: Chart) -> None:
    objects = chart.render(namespace="serving", settings={"crds.apply": False})
    assert not [o for o in objects if o["metadata"]["labels"]["app.kubernetes.io/component"] == "crds" or "customresource" in str(o)]


def test_removal_is_allowed_by_value(chart: Chart) -> None:
    for allowed in (False, True):
        objects = chart.render(namespace="serving", settings={"crds.allowRemoval": allowed})
        (job,) = (o for o in objects if o["kind"] == "Job")
        assert ("--allow-removal" in job["spec"]["template"]["spec"]["containers"][0]["args"]) is allowed


@pytest.mark.usefixtures("no_crds")
def test_it_makes_them_where_there_are_none_and_they_are_served_when_it_ends(server: ApiServer, hook: list[Resource]) -> None:
    done = run(server, hook)
    assert done.returncode == 0, done.stderr
    create(server, pool())
    assert done.stderr.count("the cluster does not have it") == len(crds_of_this_release())
    assert all(
        server.call("GET", f"{CRDS}/{n}")["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for n in crds_of_this_release()
    )
    assert run(server, hook).returncode == 0, "again"


@pytest.mark.usefixtures("no_crds")
def test_an_older_crd_learns_the_fields_of_this_release_and_its_objects_stay(server: ApiServer, hook: list[Resource]) -> None:
    make(server, released("0.0.9", drop="hostPool"))
    before = create(server, pool())
    with pytest.raises(httpx.HTTPStatusError) as refused:
        create(server, pool(hostPool="1Gi"))
    assert "unknown field" in refused.value.response.text
    done = run(server, hook)
    assert done.returncode == 0, done.stderr
    assert "it was of release 0.0.9" in done.stderr
    path = f"{API}/namespaces/{before['metadata']['namespace']}/pools/cpu"
    assert server.call("GET", path)["metadata"]["uid"] == before["metadata"]["uid"]
    changed = server.call("PATCH", f"{path}?fieldValidation=Strict", {"spec": {"hostPool": "1Gi"}}, content_type=MERGE)
    assert changed["spec"]["hostPool"] == "1Gi"


@pytest.mark.usefixtures("no_crds")
def test_a_newer_crd_stays_and_so_do_the_fields_of_its_objects(server: ApiServer, hook: list[Resource]) -> None:
    make(server, released("9.0.0", add="future"))
    kept = create(server, pool(future="x"))
    done = run(server, hook, "--allow-removal")
    assert done.returncode == 0, done.stderr
    assert "it is of release 9.0.0, newer than this one" in done.stderr
    assert release_of(server) == "9.0.0"
    assert server.call("GET", f"{API}/namespaces/{kept['metadata']['namespace']}/pools/cpu")["spec"]["future"] == "x"


@pytest.mark.usefixtures("no_crds")
def test_what_objects_would_lose_stops_it_before_anything_is_written(server: ApiServer, hook: list[Resource]) -> None:
    make(server, released("0.0.9", add="past"))
    done = run(server, hook)
    assert done.returncode == 1
    assert "pools.aerostat.dev: objects would lose spec.past: set crds.allowRemoval=true once no object has them" in done.stderr
    assert [crd["metadata"]["name"] for crd in server.call("GET", CRDS)["items"]] == ["pools.aerostat.dev"], "no other CRD was made"
    assert run(server, hook, "--allow-removal").returncode == 0
    assert release_of(server) == release_of(server, "models.aerostat.dev") != "0.0.9"


def test_its_account_touches_no_other_crd(server: ApiServer, hook: list[Resource]) -> None:
    account = hook[0]["metadata"]
    kubeconfig = server.kubeconfig_of(NamespacedName(account["namespace"], account["name"]))
    other = copy.deepcopy(released("1.0.0"))
    other["metadata"]["name"] = "pools.example.com"
    other["spec"]["group"] = "example.com"
    for command in (
        ("apply", "--server-side", "--filename=-"),
        ("delete", "crd/pools.aerostat.dev"),
        ("get", "crds"),
        ("get", "secrets", "-A"),
    ):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            server.kubectl(*command, stdin=yaml.safe_dump(other), kubeconfig=kubeconfig)
        assert "orbidden" in refused.value.stderr
