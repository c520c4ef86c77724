"""The cluster kit does what a Kubernetes does: pods on both nodes, Services, tokens, logs; and a node that loses its power."""

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from aerostat_testing.kubernetes.client import is_true
from aerostat_testing.kubernetes.nodes import oci
from aerostat_testing.kubernetes.nodes.cluster import PLANE, Nodes
from aerostat_testing.kubernetes.nodes.namespace import NodesNamespace
from aerostat_testing.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long]

START_LIMIT: Final = 60.0
LOSS_LIMIT: Final = 60.0
ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"


def workload(kind: str, name: str, *, image: str = oci.HELLO, **spec: Any) -> dict[str, Any]:
    """Of pods that say their names on port 8080, and see their node's /var/cache."""
    ready = {"httpGet": {"port": 8080, "path": "/ready"}, "periodSeconds": 1}
    volume = {"name": "cache", "hostPath": {"path": "/var/cache", "type": "DirectoryOrCreate"}}
    container: dict[str, Any] = {"name": "hello", "image": image, "args": ["serve", ":8080"], "readinessProbe": ready}
    container |= {"volumeMounts": [{"name": "cache", "mountPath": "/cache"}]}
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    labels = {"matchLabels": {"app": name}}
    pod = {"containers": [container], "volumes": [volume], "topologySpreadConstraints": [spread | {"labelSelector": labels}]}
    template = {"metadata": {"labels": {"app": name}}, "spec": pod | {"terminationGracePeriodSeconds": 1}}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": {"selector": labels, "template": template, **spec}}


def service(name: str) -> dict[str, Any]:
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def node_of(pod: dict[str, Any]) -> str:
    name: str = pod["spec"]["nodeName"]
    return name


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def started(namespace: NodesNamespace, app: str, count: int) -> list[dict[str, Any]]:
    def all_ready() -> list[dict[str, Any]] | None:
        found = namespace.ready_pods(app)
        return found if len(found) == count else None

    return wait_for(all_ready, f"{count} pods of {app} are ready", limit=START_LIMIT)


def hello(namespace: NodesNamespace, pod: dict[str, Any], *arguments: str) -> str:
    return namespace.kubectl("exec", pod["metadata"]["name"], "--", "/hello", *arguments)


def answering(namespace: NodesNamespace, pod: dict[str, Any], url: str) -> set[str]:
    """Which pods answer that one, of many calls; none while its node has not heard of the Service."""
    try:
        return set(hello(namespace, pod, "get", "-n", "40", url).split())
    except subprocess.CalledProcessError:
        return set()


def await_answers(namespace: NodesNamespace, pod: dict[str, Any], url: str, *, of: list[dict[str, Any]]) -> None:
    """Until exactly those pods answer that one."""
    wait_for(lambda: answering(namespace, pod, url) == names(of), f"{url} on {node_of(pod)} is answered by all", limit=START_LIMIT)


def test_both_nodes_are_ready_and_say_which_version_they_are(nodes: Nodes) -> None:
    found = nodes.get("nodes")["items"]
    assert [node["metadata"]["name"] for node in found] == ["node1", "node2"] == list(nodes.names)
    assert all(is_true(node, "Ready") for node in found)
    assert {node["status"]["nodeInfo"]["kubeletVersion"] for node in found} == {f"v{nodes.found.control_plane.version}"}


def test_pods_spread_and_a_service_balances_over_them_from_either_node(nodes_namespace: NodesNamespace) -> None:
    nodes_namespace.apply(workload("Deployment", "hello", replicas=2), service("hello"))
    pods = started(nodes_namespace, "hello", 2)
    assert {node_of(pod) for pod in pods} == {"node1", "node2"}
    address = nodes_namespace.get("service", "hello")["spec"]["clusterIP"]
    for pod in pods:
        await_answers(nodes_namespace, pod, f"http://{address}", of=pods)


def test_a_service_has_a_name_in_its_namespace_and_outside(nodes_namespace: NodesNamespace) -> None:
    nodes_namespace.apply(workload("DaemonSet", "hello"), service("hello"))
    (pod, _) = pods = started(nodes_namespace, "hello", 2)
    for name in ("hello", f"hello.{nodes_namespace.name}.svc", f"hello.{nodes_namespace.name}.svc.cluster.local"):
        await_answers(nodes_namespace, pod, f"http://{name}", of=pods)


def test_a_daemon_set_has_a_pod_on_each_node_that_sees_that_nodes_files(nodes: Nodes, nodes_namespace: NodesNamespace) -> None:
    for name in nodes.names:
        folder = nodes.disk(name) / "var/cache"
        folder.mkdir(exist_ok=True)
        (folder / "whose").write_text(f"of {name}")
    nodes_namespace.apply(workload("DaemonSet", "hello"))
    pods = started(nodes_namespace, "hello", 2)
    assert {node_of(pod): hello(nodes_namespace, pod, "cat", "/cache/whose") for pod in pods} == {"node1": "of node1", "node2": "of node2"}


def test_commands_run_in_a_pod_and_its_logs_are_there(nodes_namespace: NodesNamespace) -> None:
    nodes_namespace.apply(workload("Deployment", "hello", replicas=1))
    (pod,) = started(nodes_namespace, "hello", 1)
    assert hello(nodes_namespace, pod, "get", "http://127.0.0.1:8080/asked").strip() == pod["metadata"]["name"]
    wait_for(lambda: "asks for /asked" in nodes_namespace.kubectl("logs", pod["metadata"]["name"]), "it is logged", limit=START_LIMIT)


def test_a_pods_token_is_known_to_the_api_server_as_that_pods(nodes_namespace: NodesNamespace) -> None:
    nodes_namespace.apply(workload("Deployment", "hello", replicas=1))
    (pod,) = started(nodes_namespace, "hello", 1)
    as_itself = ["get", "-ca", f"{ACCOUNT}/ca.crt", "-token", f"{ACCOUNT}/token"]
    assert json.loads(hello(nodes_namespace, pod, *as_itself, "https://10.96.0.1/version"))["major"] == "1"
    review: dict[str, Any] = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
    review |= {"spec": {"token": hello(nodes_namespace, pod, "cat", f"{ACCOUNT}/token")}}
    told = nodes_namespace.nodes.kubectl("create", "--filename=-", "--output=json", stdin=json.dumps(review))
    user = json.loads(told)["status"]["user"]
    assert user["username"] == f"system:serviceaccount:{nodes_namespace.name}:default"
    assert user["extra"]["authentication.kubernetes.io/node-name"] == [node_of(pod)]


def test_a_node_that_loses_its_power_is_missed_and_welcome_back(nodes: Nodes, nodes_namespace: NodesNamespace, tmp_path: Path) -> None:
    later = "localhost/later:1"
    oci.write_archive(tmp_path / "later.tar", name=later, program=nodes.found.images / "hello")
    nodes_namespace.apply(workload("Deployment", "hello", replicas=2))
    lost = next(pod for pod in started(nodes_namespace, "hello", 2) if node_of(pod) == "node2")

    nodes.cut_power("node2")
    wait_for(lambda: not nodes.is_ready("node2"), "the node is not ready", limit=LOSS_LIMIT)
    wait_for(lambda: names([lost]) - names(nodes_namespace.ready_pods("hello")), "its pod is known as lost", limit=LOSS_LIMIT)
    assert all(node_of(pod) == "node1" for pod in started(nodes_namespace, "hello", 2)), "another one takes its place"
    nodes.import_image(tmp_path / "later.tar")

    nodes.power_on("node2")
    nodes.wait_until_ready("node2")
    wait_for(lambda: names([lost]) - names(nodes_namespace.pods("hello")), "what was lost is gone for good", limit=LOSS_LIMIT)
    nodes_namespace.apply(workload("DaemonSet", "later", image=later))
    assert {node_of(pod) for pod in started(nodes_namespace, "later", 2)} == {"node1", "node2"}


def test_pods_go_on_while_the_api_server_is_away(nodes: Nodes, nodes_namespace: NodesNamespace) -> None:
    nodes_namespace.apply(workload("Deployment", "hello", replicas=1))
    (pod,) = started(nodes_namespace, "hello", 1)
    nodes.hold(PLANE, "kube-apiserver")
    wait_for(lambda: not nodes.is_serving(), "the API server is away", limit=START_LIMIT)
    asked = nodes.command(str(nodes.found.images / "hello"), "get", f"http://{pod['status']['podIP']}:8080")
    told = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=START_LIMIT).stdout
    assert told.strip() == pod["metadata"]["name"]
    assert not nodes.is_serving(), "the pod answered without it"
    nodes.release(PLANE, "kube-apiserver")
    wait_for(nodes.is_serving, "the API server is back", limit=START_LIMIT)
    nodes.wait_until_ready(*nodes.names)
    assert started(nodes_namespace, "hello", 1)[0]["status"]["containerStatuses"][0]["restartCount"] == 0
    assert names(nodes_namespace.pods("hello")) == names([pod])


def test_what_is_kept_of_a_failed_test_has_objects_events_and_logs(nodes_namespace: NodesNamespace, tmp_path: Path) -> None:
    nodes_namespace.apply(workload("Deployment", "hello", replicas=1), workload("Deployment", "never", image="localhost/no:1", replicas=1))
    (pod,) = started(nodes_namespace, "hello", 1)
    wait_for(lambda: "ErrImage" in nodes_namespace.kubectl("get", "pods"), "one has no image", limit=START_LIMIT)
    nodes_namespace.collect(tmp_path / "kept")
    kept = {path.name: path.read_text() for path in (tmp_path / "kept").iterdir()}
    assert "kind: Deployment" in kept["objects.yaml"]
    assert "localhost/no:1" in kept["events.txt"]
    assert "serves on :8080" in kept[f"{pod['metadata']['name']}-hello.log"]
    assert "waiting to start" in "".join(text for name, text in kept.items() if name.startswith("never-"))
    assert {"control-plane-kube-apiserver.log", "node1-kubelet.log", "node2-kubelet.log"} <= kept.keys()
