"""After `helm uninstall`: objects stay, and whoever deletes them, or their namespace, waits for nobody of ours."""

import subprocess
from pathlib import Path
from typing import Final

import pytest

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.chart import CHART, CLUSTER_WIDE, Chart
from aerostat_testing.kubernetes.installed import Installed, install
from aerostat_testing.kubernetes.operators import OperatorProcess, objects, only_node
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.cluster
QUICKSTART: Final = CHART.parents[1] / "crds/samples/quickstart"
LIMIT: Final[Seconds] = 60.0
KINDS: Final = ("models", "pools", "slos", "instances")
NODE: Final = "node1"


@pytest.fixture
def left(apiserver: ApiServer, chart: Chart, tmp_path: Path) -> Installed:
    """What an installation leaves that had models and Instances: the chart's namespaces, rights and processes are gone."""
    only_node(apiserver, NODE)
    apiserver.run_controllers()
    made = install(chart, apiserver, NODE, one_namespace=True)
    apiserver.kubectl("apply", "--server-side", f"--namespace={made.watched}", "--filename", str(QUICKSTART))
    lease = f"{made.namespace}/aerostat-operator"
    with OperatorProcess(apiserver, made.watched, tmp_path / "operator.log", kubeconfig=made.kubeconfig("operator"), lease=lease):
        wait_for(lambda: objects(apiserver, made.watched, "instances"), "there is an Instance", limit=LIMIT)
    for namespace in (made.namespace, made.nodes):
        apiserver.delete(f"/api/v1/namespaces/{namespace}")
    for o in (o for o in made.rendered if o["kind"] in CLUSTER_WIDE):
        apiserver.kubectl("delete", o["kind"], o["metadata"]["name"])
    return made


def counts(server: ApiServer, namespace: str) -> dict[str, int]:
    return {kind: len(objects(server, namespace, kind)) for kind in KINDS}


def namespaces(server: ApiServer) -> set[str]:
    return {item["metadata"]["name"] for item in server.call("GET", "/api/v1/namespaces")["items"]}


def test_objects_stay_without_finalizers_and_a_namespace_is_deleted_with_all_of_them(apiserver: ApiServer, left: Installed) -> None:
    assert all(counts(apiserver, left.watched).values())
    for kind in KINDS:
        for name, found in objects(apiserver, left.watched, kind).items():
            assert "finalizers" not in found["metadata"], f"{kind} {name}"
    apiserver.delete(f"/api/v1/namespaces/{left.watched}")
    wait_for(lambda: left.watched not in namespaces(apiserver), "the namespace is gone", limit=LIMIT)


def test_models_and_pools_are_deleted_and_take_their_instances_with_them(apiserver: ApiServer, left: Installed) -> None:
    """Also where whoever deletes waits for what is owned, which Instances block."""
    try:
        apiserver.kubectl("delete", "models,pools,slos", "--all", f"--namespace={left.watched}", "--cascade=foreground", "--timeout=30s")
    except subprocess.CalledProcessError as error:
        raise AssertionError(f"a deletion hangs: {error.stderr}") from error
    wait_for(lambda: not any(counts(apiserver, left.watched).values()), "nothing of ours is left", limit=LIMIT)
