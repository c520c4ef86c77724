"""The engines' pod takes all devices of its node, so that the scheduler gives them to nobody else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from aerostat_agent.keeper.container import CGROUP_V1
from aerostat_core.resources import Resource
from aerostat_testing.kubernetes.chart import Chart
from aerostat_testing.kubernetes.nodes import oci
from aerostat_testing.kubernetes.nodes.cluster import Nodes
from aerostat_testing.kubernetes.nodes.namespace import NodesNamespace
from aerostat_testing.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long]

LIMIT: Final = 60.0
DEVICE: Final = "aerostat.dev/fake-gpu"
COUNT: Final = 2
NODE: Final = "node1"


@pytest.fixture
def devices(nodes: Nodes) -> Iterator[None]:
    """As a device plugin would announce them."""
    patch_capacity(nodes, str(COUNT))
    yield
    patch_capacity(nodes, None)


def patch_capacity(nodes: Nodes, count: str | None) -> None:
    body = json.dumps({"status": {"capacity": {DEVICE: count}, "allocatable": {DEVICE: count}}})
    nodes.kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", f"--patch={body}")


def engines(nodes: Nodes, namespace: NodesNamespace, home: Path) -> list[Resource]:
    """The chart's DaemonSet and its account, with the image that is at hand."""
    pool = {
        "name": "fake",
        "nodeSelector": {"kubernetes.io/hostname": NODE},
        "image": {"repository": "aerostat/engines-cpu"},
        "devices": {"resource": DEVICE, "count": COUNT},
        "sharedMemory": "64Mi",
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "4Gi"}},
    }
    chart = Chart(helm=nodes.found.helm / "helm", kubernetes=nodes.found.control_plane.version, home=home)
    rendered = chart.render(namespace=namespace.name, settings={"nodePools": [pool]})
    mine = [o for o in rendered if o["metadata"]["labels"]["app.kubernetes.io/component"] == "engines"]
    kept = [o for o in mine if o["kind"] in ("ServiceAccount", "DaemonSet")]
    spec = kept[-1]["spec"]["template"]["spec"]
    del spec["initContainers"]
    spec["terminationGracePeriodSeconds"] = 1
    (container,) = spec["containers"]
    container |= {"image": oci.HELLO, "command": ["/hello"], "args": ["serve", ":8080"]}
    container["readinessProbe"] = {"httpGet": {"port": 8080, "path": "/ready"}, "periodSeconds": 1}
    return kept


def competitor() -> Resource:
    asks = {"limits": {DEVICE: 1}}
    container: dict[str, Any] = {"name": "hello", "image": oci.HELLO, "args": ["serve", ":8080"], "resources": asks}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "competitor"}, "spec": {"containers": [container]}}


def phase(namespace: NodesNamespace) -> str:
    found: str = namespace.get("pod", "competitor")["status"]["phase"]
    return found


def why_unscheduled(namespace: NodesNamespace) -> str:
    conditions = namespace.get("pod", "competitor")["status"].get("conditions", ())
    return "".join(c.get("message", "") for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False")


def seen_limit(namespace: NodesNamespace) -> int:
    """The memory limit of the engines' container, where the keeper reads it."""
    (pod,) = namespace.get("pods", "--selector=app.kubernetes.io/component=engines")["items"]
    return int(namespace.kubectl("exec", pod["metadata"]["name"], "--", "/hello", "cat", f"/{CGROUP_V1}"))


@pytest.mark.usefixtures("devices")
def test_a_competing_pod_stays_pending_until_the_engines_are_gone(nodes: Nodes, nodes_namespace: NodesNamespace, tmp_path: Path) -> None:
    nodes_namespace.apply(*engines(nodes, nodes_namespace, tmp_path))
    wait_for(
        lambda: nodes_namespace.get("daemonset", "aerostat-engines-fake")["status"].get("numberReady") == 1, "the engines run", limit=LIMIT
    )
    nodes_namespace.apply(competitor())
    wait_for(lambda: f"Insufficient {DEVICE}" in why_unscheduled(nodes_namespace), "it is told why it waits", limit=LIMIT)
    assert phase(nodes_namespace) == "Pending"
    assert seen_limit(nodes_namespace) == 4 << 30, "what the keeper reports is the container's, not the node's"
    nodes_namespace.kubectl("delete", "daemonset", "aerostat-engines-fake")
    wait_for(lambda: phase(nodes_namespace) == "Running", "devices that nobody holds are given away", limit=LIMIT)
