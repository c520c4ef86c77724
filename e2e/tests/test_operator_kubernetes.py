"""The operator over a real API server: what users declare, what replicas agree on, what processes and servers survive."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from aerostat_core.ids import NamespacedName, Seconds
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.client import is_true
from aerostat_testing.kubernetes.operators import (
    API,
    LEASE_DURATION,
    MERGE,
    OperatorProcess,
    event_notes,
    events,
    objects,
    only_node,
    report_open,
)
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.cluster
QUICKSTART: Final = Path(__file__).resolve().parents[2] / "crds/samples/quickstart"
LIMIT: Final[Seconds] = 30.0
ROLE: Final = (
    {"apiGroups": ["aerostat.dev"], "resources": ["models", "pools", "slos"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["aerostat.dev"], "resources": ["models/status", "pools/status", "slos/status"], "verbs": ["patch"]},
    {"apiGroups": ["aerostat.dev"], "resources": ["instances"], "verbs": ["list", "watch", "create", "patch", "delete"]},
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]},
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["get", "create", "patch"]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
)

Start = Callable[[], OperatorProcess]


@pytest.fixture
def start(apiserver: ApiServer, namespace: str, tmp_path: Path) -> Start:
    """Starts one more operator, each with exactly the rights that it needs."""
    only_node(apiserver, "node1")
    kubeconfig = apiserver.kubeconfig_for(NamespacedName(namespace, "operator"), ROLE)
    count = iter(range(100))
    return lambda: OperatorProcess(apiserver, namespace, tmp_path / f"operator-{next(count)}.log", kubeconfig=kubeconfig)


def apply_quickstart(server: ApiServer, namespace: str) -> None:
    server.kubectl("apply", "--server-side", "--namespace", namespace, "--filename", str(QUICKSTART))


def models_of(server: ApiServer, namespace: str) -> dict[str, dict[str, Any]]:
    """What Instances list, by model."""
    return {m["name"]: m for i in objects(server, namespace, "instances").values() for m in i["spec"]["models"]}


def merge(server: ApiServer, namespace: str, path: str, body: dict[str, Any]) -> None:
    server.call("PATCH", f"{API}/namespaces/{namespace}/{path}", body, content_type=MERGE)


def serves(server: ApiServer, namespace: str, *names: str) -> Callable[[], bool]:
    return lambda: models_of(server, namespace).keys() == set(names)


def set_kv(server: ApiServer, namespace: str, model: str, size: str) -> None:
    merge(server, namespace, f"models/{model}", {"spec": {"memory": {"kvMin": size, "kvMax": size}}})


def has_kv(server: ApiServer, namespace: str, model: str, size: str) -> Callable[[], bool]:
    return lambda: models_of(server, namespace).get(model, {}).get("kvFloor") == size


def all_ready(server: ApiServer, namespace: str) -> bool:
    report_open(server, namespace)
    declared = [*objects(server, namespace, "models").values(), *objects(server, namespace, "pools").values()]
    return all(is_true(resource, "Ready") for resource in declared)


def holder(server: ApiServer, namespace: str) -> str:
    lease = server.call("GET", f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/aerostat-operator")
    return str(lease["spec"]["holderIdentity"])


def test_what_is_applied_edited_and_deleted_is_reconciled_with_the_least_rights(apiserver: ApiServer, namespace: str, start: Start) -> None:
    with start().leading() as operator:
        apply_quickstart(apiserver, namespace)
        wait_for(serves(apiserver, namespace, "assistant", "coder"), "Instances list both models", limit=LIMIT)
        pool = objects(apiserver, namespace, "pools")["cpu"]
        for instance in objects(apiserver, namespace, "instances").values():
            (owner,) = instance["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"]) == ("Pool", pool["metadata"]["uid"])
        wait_for(lambda: all_ready(apiserver, namespace), "all is Ready", limit=LIMIT)
        model = objects(apiserver, namespace, "models")["coder"]
        assert model["status"]["url"] == "http://routers/v1"
        assert model["status"]["observedGeneration"] == model["metadata"]["generation"]
        for plural in ("models", "pools", "slos", "instances"):
            for found in objects(apiserver, namespace, plural).values():
                assert not found["metadata"].get("finalizers"), "nothing that we make or read waits for us to be deleted"
                assert not found["metadata"].get("annotations", {}).keys() & {"kopf.zalando.org/last-handled-configuration"}

        set_kv(apiserver, namespace, "coder", "256Mi")
        wait_for(has_kv(apiserver, namespace, "coder", "256Mi"), "the edit arrives", limit=LIMIT)
        apiserver.kubectl("delete", "model", "coder", "--namespace", namespace, "--timeout=10s")
        wait_for(serves(apiserver, namespace, "assistant"), "what was deleted goes", limit=LIMIT)
        apiserver.kubectl("delete", "pool", "cpu", "--namespace", namespace, "--timeout=10s")
        wait_for(lambda: not objects(apiserver, namespace, "instances"), "a pool's Instances go with it", limit=LIMIT)
        assert operator.metric("aerostat_reconcile_errors_total") == 0
        began = time.monotonic()
        assert operator.stop() == 0
        assert time.monotonic() - began < 8.0
        assert holder(apiserver, namespace) == "", "a lease is given back"


def test_a_model_that_was_deleted_while_no_operator_ran_is_gone_after_its_start(apiserver: ApiServer, namespace: str, start: Start) -> None:
    with start().leading() as operator:
        apply_quickstart(apiserver, namespace)
        wait_for(serves(apiserver, namespace, "assistant", "coder"), "Instances list both models", limit=LIMIT)
        operator.kill()
    apiserver.kubectl("delete", "model", "coder", "--namespace", namespace, "--timeout=10s")
    with start().leading():
        wait_for(serves(apiserver, namespace, "assistant"), "what was deleted goes", limit=LIMIT)


def test_a_kill_in_the_midst_of_a_run_leaves_nothing_that_the_next_one_does_not_mend_and_no_event_twice(
    apiserver: ApiServer, namespace: str, start: Start
) -> None:
    apply_quickstart(apiserver, namespace)
    with start() as operator:
        wait_for(lambda: objects(apiserver, namespace, "instances"), "the first write", limit=LIMIT)
        operator.kill()
    with start().leading():
        wait_for(serves(apiserver, namespace, "assistant", "coder"), "Instances list both models", limit=LIMIT)
        wait_for(lambda: all_ready(apiserver, namespace), "all is Ready", limit=LIMIT)
        ready = {("assistant", "Ready", 1), ("coder", "Ready", 1)}  # told after it is written
        wait_for(lambda: ready <= set(events(apiserver, namespace)), "it is told that both are Ready", limit=LIMIT)
        told = events(apiserver, namespace)
    with start().leading() as operator:  # and once more, with nothing to do
        wait_for(lambda: operator.metric("aerostat_reconcile_seconds_count"), "a whole run", limit=LIMIT)
        assert all_ready(apiserver, namespace)
        now = events(apiserver, namespace)
    assert set(told) <= set(now)
    assert all(count == 1 for _, _, count in now), now
    said = event_notes(apiserver, namespace)
    assert len(set(said)) == len(said), said


def test_of_two_operators_one_writes_and_the_other_takes_over_when_it_dies_or_stops(
    apiserver: ApiServer, namespace: str, start: Start
) -> None:
    apply_quickstart(apiserver, namespace)
    with start().leading() as first, start().ready() as second:
        wait_for(serves(apiserver, namespace, "assistant", "coder"), "Instances list both models", limit=LIMIT)
        assert not second.is_leading()
        assert second.metric("aerostat_reconcile_seconds_count") == 0, "who does not lead plans nothing"
        first.kill()
        set_kv(apiserver, namespace, "coder", "256Mi")
        began = time.monotonic()
        wait_for(has_kv(apiserver, namespace, "coder", "256Mi"), "the other one takes over", limit=LIMIT)
        assert time.monotonic() - began < 3 * LEASE_DURATION
        assert second.is_leading()
        with start().ready() as third:
            assert not third.is_leading()
            assert second.stop() == 0
            began = time.monotonic()
            wait_for(third.is_leading, "a lease that was given back is taken", limit=LIMIT)
            assert time.monotonic() - began < LEASE_DURATION


def test_an_operator_that_was_stopped_too_long_writes_nothing_when_it_goes_on(apiserver: ApiServer, namespace: str, start: Start) -> None:
    apply_quickstart(apiserver, namespace)
    with start().leading() as first, start().ready() as second:
        wait_for(serves(apiserver, namespace, "assistant", "coder"), "Instances list both models", limit=LIMIT)
        first.hang()
        second.leading()
        second.hang()  # so that only the first could write, and it must not
        successor = holder(apiserver, namespace)
        set_kv(apiserver, namespace, "coder", "256Mi")
        first.resume()
        time.sleep(LEASE_DURATION / 4)  # less than what the lease of the second still lasts
        assert not has_kv(apiserver, namespace, "coder", "256Mi")() or holder(apiserver, namespace) != successor
        second.resume()
        wait_for(has_kv(apiserver, namespace, "coder", "256Mi"), "one of them goes on", limit=LIMIT)


def test_a_leader_that_may_not_list_is_not_ready_and_names_the_right_until_it_has_it(
    apiserver: ApiServer, namespace: str, start: Start
) -> None:
    apply_quickstart(apiserver, namespace)
    with start().leading() as first, start().ready() as second:
        without = [{**rule, "resources": [r for r in rule["resources"] if r != "slos"]} for rule in ROLE]
        role = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{namespace}-operator"
        apiserver.call("PATCH", role, {"rules": without}, content_type=MERGE)
        first.kill()
        second.leading()
        wait_for(lambda: "may not list slos" in second.get("/readyz"), "the next leader says which right it lacks", limit=LIMIT)
        apiserver.call("PATCH", role, {"rules": list(ROLE)}, content_type=MERGE)
        second.ready()
        set_kv(apiserver, namespace, "coder", "256Mi")
        wait_for(has_kv(apiserver, namespace, "coder", "256Mi"), "it goes on", limit=LIMIT)


def test_an_api_server_that_restarts_is_waited_for_and_nothing_is_missed(apiserver: ApiServer, namespace: str, start: Start) -> None:
    apply_quickstart(apiserver, namespace)
    with start().leading() as operator:
        wait_for(serves(apiserver, namespace, "assistant", "coder"), "Instances list both models", limit=LIMIT)
        for end in (apiserver.stop, apiserver.kill):
            end()
            time.sleep(2 * LEASE_DURATION)
            assert operator.get("/healthz") == "ok\n", "a restart of the operator would cure nothing"
            assert "API server" in operator.get("/readyz")
            apiserver.start()
            size = "256Mi" if end == apiserver.stop else "320Mi"
            set_kv(apiserver, namespace, "coder", size)
            wait_for(has_kv(apiserver, namespace, "coder", size), "an edit after the outage arrives", limit=LIMIT)
            assert operator.get("/readyz") == "ok\n"
        apiserver.kubectl("delete", "model", "coder", "--namespace", namespace, "--timeout=10s")
        wait_for(serves(apiserver, namespace, "assistant"), "a deletion after the outage arrives", limit=LIMIT)


def test_what_others_write_into_our_fields_is_taken_back_and_into_theirs_is_left(
    apiserver: ApiServer, namespace: str, start: Start
) -> None:
    apply_quickstart(apiserver, namespace)
    with start().leading():
        wait_for(serves(apiserver, namespace, "assistant", "coder"), "Instances list both models", limit=LIMIT)
        ((name, before),) = objects(apiserver, namespace, "instances").items()
        foreign = {"metadata": {"annotations": {"example.com/note": "mine"}}, "spec": {"draining": True, "models": []}}
        merge(apiserver, namespace, f"instances/{name}", foreign)

        def is_as_before() -> bool:
            return bool(objects(apiserver, namespace, "instances")[name]["spec"] == before["spec"])

        wait_for(is_as_before, "the spec is as it shall be", limit=LIMIT)
        annotations = objects(apiserver, namespace, "instances")[name]["metadata"]["annotations"]
        assert annotations == {"example.com/note": "mine"}
        merge(apiserver, namespace, "models/coder/status", {"status": {"state": "Open", "conditions": []}})
        wait_for(lambda: is_true(objects(apiserver, namespace, "models")["coder"], "Scheduled"), "the status is ours", limit=2 * LIMIT)


@pytest.mark.long
def test_an_operator_at_rest_asks_for_little(apiserver: ApiServer, namespace: str, start: Start) -> None:
    """Without open watches and the renewal of the lease: at most ten calls a minute."""
    window: Seconds = 125.0  # a sweep is among them
    apply_quickstart(apiserver, namespace)
    with start().leading():
        wait_for(lambda: all_ready(apiserver, namespace), "all is Ready", limit=LIMIT)
        time.sleep(5.0)
        before = n_calls(apiserver)
        time.sleep(window)
        assert (n_calls(apiserver) - before) / window * 60 <= 10


def n_calls(server: ApiServer) -> float:
    """Calls that an operator may have made, whatever came of them."""
    lines = server.kubectl("get", "--raw", "/metrics").splitlines()
    counted = [line for line in lines if line.startswith("apiserver_request_total{") and 'verb="WATCH"' not in line]
    resources = [f'resource="{name}"' for name in ("models", "pools", "slos", "instances", "nodes", "events")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counted if any(resource in line for resource in resources))
