"""What clients see when parts of an installation are broken under them, and how long it takes until they are served again."""

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from aerostat_core.resources import API_VERSION
from aerostat_testing.calls import chat
from aerostat_testing.kubernetes.nodes.cluster import PLANE
from aerostat_testing.kubernetes.nodes.door import Door
from aerostat_testing.kubernetes.nodes.fixtures import Tell
from aerostat_testing.kubernetes.nodes.release import QUICKSTART, SOURCE, HelmError, Release, processes_of
from aerostat_testing.load import Listener, Load
from aerostat_testing.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.e2e]

MODELS: Final = ("assistant", "coder")
HELLO: Final = [{"role": "user", "content": "Hello!"}]
N_LONG: Final = 150  # tokens that take seconds
BACK_LIMIT: Final = 240.0
TOKEN: Final = "/var/run/secrets/kubernetes.io/serviceaccount/token"


@pytest.fixture(scope="module")
def installed(release: Release) -> Release:
    """With the quickstart, served."""
    release.seed(SOURCE)
    release.install()
    release.team.kubectl("apply", f"--filename={QUICKSTART}")
    release.wait_ready(*MODELS)
    return release


@pytest.fixture(scope="module")
def http(installed: Release) -> Iterator[Door]:
    with installed.door("http") as door:
        yield door


@pytest.fixture
def whole(installed: Release, http: Door) -> Release:
    """What the test before has broken is well again."""
    installed.wait_ready(*MODELS)
    for model in MODELS:
        assert chat(http.url, model, HELLO).text
    return installed


def test_a_killed_agent_process_breaks_no_stream(whole: Release, http: Door, tell: Tell) -> None:
    (node,) = whole.places()["assistant"]
    pod, engines = whole.pod("agent", node), _engine_pids(whole, node)
    with Load(http.url, "assistant") as load, Listener(http.url, "assistant", n_tokens=N_LONG) as client:
        began = time.monotonic()
        (agent,) = processes_of(pod, "aerostat_agent --node")
        agent.kill()
        whole.wait_for(lambda: _restarts(whole, node) > 0, "the container is started again", limit=60)
        whole.wait_pods("agent", 2)
        took = time.monotonic() - began
        load.wait_answered(limit=60)
    tell(f"agent killed: ready after {took:.1f} s; stream: {client.ending}; calls: {load.told(began)}")
    assert client.is_whole
    assert load.away(began) == 0.0
    assert _engine_pids(whole, node) == engines, "engines are adopted, not started again"


def test_a_deleted_agent_pod_breaks_no_stream(whole: Release, http: Door, tell: Tell) -> None:
    (node,) = whole.places()["assistant"]
    pod, engines = whole.pod("agent", node), _engine_pids(whole, node)
    with Load(http.url, "assistant") as load, Listener(http.url, "assistant", n_tokens=N_LONG) as client:
        began = time.monotonic()
        whole.delete_pod(pod)
        whole.wait_replaced("agent", [pod], 2)
        took = time.monotonic() - began
        load.wait_answered(limit=60)
    tell(f"agent pod deleted: another ready after {took:.1f} s; stream: {client.ending}; calls: {load.told(began)}")
    assert client.is_whole
    assert load.away(began) == 0.0
    assert _engine_pids(whole, node) == engines


def test_an_agents_token_is_of_no_use_for_another_nodes_instance(whole: Release, tell: Tell) -> None:
    pod = whole.pod("agent", "node1")
    token = whole.node_pods.kubectl("exec", pod["metadata"]["name"], "--container=agent", "--", "cat", TOKEN)
    instances = {item["spec"]["node"]: item["metadata"]["name"] for item in whole.team.get("instances")["items"]}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        _report(whole, instances["node2"], token)
    tell(f"node1's token for node2's Instance: {refused.value.stderr.strip()}")
    assert "Forbidden" in refused.value.stderr
    assert 'this agent is on node "node1" and reports on Instances of that node only, not of "node2"' in refused.value.stderr
    _report(whole, instances["node1"], token)


def test_a_deleted_router_pod_finishes_its_streams(whole: Release, http: Door, tell: Tell) -> None:
    pod = whole.pods("router")[0]
    with Load(http.url, *MODELS) as load, Door(whole.nodes, pod["status"]["podIP"], 8080) as its_own:
        with Listener(its_own.url, "assistant", n_tokens=N_LONG) as client:
            began = time.monotonic()
            whole.delete_pod(pod)
        ended = time.monotonic() - began
        whole.wait_replaced("router", [pod], 2)
    tell(f"router pod deleted: its stream: {client.ending} {ended:.1f} s later; calls: {load.told(began)}")
    assert client.is_whole
    assert load.away(began) == 0.0


def test_a_node_without_power_is_replaced_and_welcome_back(whole: Release, http: Door, tell: Tell) -> None:
    """The test's way to Services is by node1, so node2 it is."""
    lost = next(model for model, nodes in whole.places().items() if nodes == {"node2"})
    (kept,) = set(MODELS) - {lost}
    with Load(http.url, lost) as away, Load(http.url, kept) as here, Listener(http.url, lost, n_tokens=N_LONG) as client:
        began = time.monotonic()
        whole.nodes.cut_power("node2")
        whole.wait_for(lambda: "node1" in whole.places()[lost], "the model is open on the other node", limit=BACK_LIMIT)
        away.wait_answered(limit=BACK_LIMIT)
        here.wait_answered(limit=BACK_LIMIT)
        took = time.monotonic() - began
    tell(f"node2 without power: {lost} again after {took:.1f} s; its stream: {client.ending}")
    tell(f"calls of {lost}: {away.told(began)}; of {kept}: {here.told(began)}")
    assert not client.is_whole
    assert client.error == "upstream_disconnected" or client.failure is not None, "nobody takes what came for the whole"
    began = time.monotonic()
    whole.nodes.power_on("node2")
    whole.nodes.wait_until_ready("node2")
    whole.wait_pods("agent", 2)
    whole.wait_pods("engines", 2)
    tell(f"node2 has power: its pods are ready after {time.monotonic() - began:.1f} s; {whole.places()}")


def test_an_operator_that_dies_at_work_is_followed_by_one_that_does_it(whole: Release, http: Door, tell: Tell) -> None:
    later = {
        "source": {"uri": SOURCE},
        "pool": "cpu",
        "slo": "interactive",
        "minReplicas": 0,
        "maxReplicas": 1,
        "memory": {"kvMin": "64Mi"},
    }
    with Load(http.url, *MODELS) as load:
        began = time.monotonic()
        whole.apply({"apiVersion": API_VERSION, "kind": "Model", "metadata": {"name": "later"}, "spec": later})
        for pod in whole.pods("operator"):
            whole.delete_pod(pod, "--grace-period=0", "--force")
        whole.wait_condition("later", "True", condition="Scheduled", limit=120)
        took = time.monotonic() - began
        whole.wait_pods("operator", 2)
    tell(f"all operators killed while a Model is declared: placed after {took:.1f} s; calls: {load.told(began)}")
    assert load.away(began) == 0.0
    whole.team.kubectl("delete", "model", "later", "--timeout=60s")


def test_an_api_server_that_is_away_for_a_minute_is_not_missed(whole: Release, http: Door, tell: Tell) -> None:
    pods = {p["metadata"]["uid"]: _restart_count(p) for c in ("operator", "router", "agent", "engines") for p in whole.pods(c)}
    with Load(http.url, *MODELS) as load, Listener(http.url, "assistant", n_tokens=N_LONG) as client:
        began = time.monotonic()
        whole.nodes.hold(PLANE, "kube-apiserver")
        wait_for(lambda: time.monotonic() - began > 60 and load.calls, "a minute is over", limit=90)
        whole.nodes.release(PLANE, "kube-apiserver")
        wait_for(whole.nodes.is_serving, "the API server is back", limit=60)
        back = time.monotonic() - began
        whole.wait_ready(*MODELS)
        load.wait_answered(limit=60)
    tell(f"API server away for {back:.1f} s; stream: {client.ending}; calls: {load.told(began)}")
    assert client.is_whole
    assert load.away(began) == 0.0
    after = {p["metadata"]["uid"]: _restart_count(p) for c in ("router", "agent", "engines") for p in whole.pods(c)}
    assert after.items() <= pods.items(), "an outage is no reason to start anew"


def test_wrong_values_are_refused_and_change_nothing(whole: Release, tell: Tell) -> None:
    revision = _revision(whole)
    for settings in ({"router": {"replcas": 3}}, {"router": {"drainSeconds": "long"}}):
        with pytest.raises(HelmError) as refused:
            whole.upgrade(settings)
        tell(f"wrong values: {str(refused.value).strip().splitlines()[-1]}")
    assert _revision(whole) == revision


def test_an_image_that_is_missing_takes_nothing_away(whole: Release, http: Door, tell: Tell) -> None:
    pods = {component: _uids(whole.pods(component)) for component in ("router", "agent", "engines")}
    with Load(http.url, *MODELS) as load:
        began = time.monotonic()
        with pytest.raises(HelmError) as failed:
            whole.upgrade({"image": {"tag": "no-such-tag"}}, "--wait", "--timeout=30s")
        assert {component: _uids(whole.pods(component)) for component in pods} == pods
        load.wait_answered(limit=30)
        tell(f"image missing: {str(failed.value).strip().splitlines()[-1]}")
        whole.upgrade({}, "--wait", "--timeout=4m")
        load.wait_answered(limit=30)
    tell(f"image missing, and right again after {time.monotonic() - began:.1f} s; calls: {load.told(began)}")
    assert load.away(began) == 0.0


def test_a_namespace_goes_with_all_that_is_declared_in_it(whole: Release, tell: Tell) -> None:
    began = time.monotonic()
    whole.nodes.kubectl("delete", "namespace", whole.team.name, "--timeout=60s")
    gone = time.monotonic() - began
    wait_for(lambda: not any(_engine_pids(whole, node) for node in whole.nodes.names), "no engine is left", limit=120)
    tell(f"namespace deleted: gone after {gone:.1f} s, engines ended after {time.monotonic() - began:.1f} s")


def _report(release: Release, instance: str, token: str) -> None:
    """On an Instance, as its agent does: by server-side apply, since an agent may not read what it writes."""
    meta = {"name": instance, "namespace": release.team.name}
    body = {"apiVersion": API_VERSION, "kind": "Instance", "metadata": meta, "status": {"summary": "as somebody says"}}
    how = ["--server-side", "--subresource=status", "--validate=false", "--field-manager=test", "--force-conflicts"]
    release.team.kubectl("apply", *how, f"--token={token}", "--filename=-", stdin=json.dumps(body))


def _engine_pids(release: Release, node: str) -> set[int]:
    return {process.pid for process in processes_of(release.pod("engines", node), "aerostat_engine.launch")}


def _restarts(release: Release, node: str) -> int:
    return _restart_count(release.pod("agent", node))


def _restart_count(pod: dict[str, Any]) -> int:
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", ()))


def _uids(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def _revision(release: Release) -> int:
    return int(json.loads(release.helm("history", release.name, "--output=json"))[-1]["revision"])
