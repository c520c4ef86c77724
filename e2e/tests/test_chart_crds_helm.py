"""The real helm over an API server: it runs the hook that brings CRDs before all else, and stops where that is refused.

There are no nodes, so the test does a kubelet's and the Job controller's part: it runs the Job's container as its account,
and says how it ended.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_operator.crds import crds_of_this_release
from aerostat_operator.policy.crds import VERSION_LABEL
from aerostat_operator.policy.statuses import format_time
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.chart import CHART, Chart
from aerostat_testing.kubernetes.operators import MERGE

pytestmark = pytest.mark.cluster

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POOLS = "pools.aerostat.dev"
LIMIT = 120.0


@pytest.fixture(scope="module")
def server(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Without any CRDs."""
    with ApiServer(tmp_path_factory.mktemp("crds-helm"), apiserver.programs) as fresh:
        fresh.run_controllers()  # what helm deletes goes with what it owns
        yield fresh


def helm(server: ApiServer, chart: Chart, namespace: str, *arguments: str) -> tuple[int, str]:
    """Its exit code and what it said, while the Jobs that it makes are run."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(chart.home), "KUBECONFIG": str(server.kubeconfig())}
    command = [str(chart.helm), *arguments, f"--namespace={namespace}"]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + LIMIT
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{command} takes too long"
            for job in server.call("GET", f"/apis/batch/v1/namespaces/{namespace}/jobs")["items"]:
                if not job["status"].get("conditions"):
                    finish(server, job)
            time.sleep(0.2)
        assert process.stdout is not None
        return process.returncode, process.stdout.read()
    finally:
        process.kill()
        process.communicate(timeout=LIMIT)


def finish(server: ApiServer, job: Resource) -> None:
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    kubeconfig = server.kubeconfig_of(NamespacedName(job["metadata"]["namespace"], spec["serviceAccountName"]))
    command = [sys.executable, *container["command"][1:], *container.get("args", ()), f"--cluster=kubernetes:?kubeconfig={kubeconfig}"]
    code = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT).returncode
    now = format_time(time.time())
    types = ("SuccessCriteriaMet", "Complete") if code == 0 else ("FailureTarget", "Failed")
    conditions = [{"type": t, "status": "True", "reason": "Ran", "lastTransitionTime": now} for t in types]
    status: dict[str, Any] = {"startTime": now, "conditions": conditions, "uncountedTerminatedPods": {}}
    status |= {"succeeded": 1, "completionTime": now} if code == 0 else {"failed": 1}
    path = f"/apis/batch/v1/namespaces/{job['metadata']['namespace']}/jobs/{job['metadata']['name']}/status"
    server.call("PATCH", path, {"status": status}, content_type=MERGE)


def change(server: ApiServer, release: str, **fields: Any) -> None:
    """The Pools' CRD becomes that of another release; a field of None is taken away."""
    crd = server.call("GET", f"{CRDS}/{POOLS}")
    crd["metadata"]["labels"][VERSION_LABEL] = release
    properties = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    for name, schema in fields.items():
        if schema is None:
            del properties[name]
        else:
            properties[name] = schema
    server.call("PUT", f"{CRDS}/{POOLS}", crd)


def seen(server: ApiServer) -> tuple[str, set[str]]:
    """Release and fields of the Pools' CRD."""
    crd = server.call("GET", f"{CRDS}/{POOLS}")
    fields = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    return crd["metadata"]["labels"][VERSION_LABEL], set(fields)


def test_an_upgrade_brings_crds_a_rollback_leaves_them_and_what_would_lose_something_stops_it(server: ApiServer, chart: Chart) -> None:
    namespace = server.create_namespace("release")
    values = ("--set-json=nodePools=[]", "--set=serviceMonitor.enabled=false")
    release, fields = crds_of_this_release()[POOLS]["metadata"]["labels"][VERSION_LABEL], None

    code, said = helm(server, chart, namespace, "install", "aerostat", str(CHART), *values)
    assert code == 0, said
    found, fields = seen(server)
    assert found == release
    for kind in ("job", "serviceaccount"):
        assert "aerostat-crds" not in server.kubectl("get", kind, f"--namespace={namespace}", "--output=name"), (
            "the hook's objects are gone"
        )

    change(server, "0.0.9", hostPool=None)
    assert helm(server, chart, namespace, "upgrade", "aerostat", str(CHART), *values)[0] == 0
    assert seen(server) == (release, fields), "it has learnt the field"

    change(server, "9.0.0", future={"type": "string"})
    assert helm(server, chart, namespace, "rollback", "aerostat", "1")[0] == 0
    assert helm(server, chart, namespace, "upgrade", "aerostat", str(CHART), *values, "--set=router.replicas=3")[0] == 0, "after a rollback"
    assert seen(server) == ("9.0.0", fields | {"future"})

    change(server, "0.0.9")
    code, said = helm(server, chart, namespace, "upgrade", "aerostat", str(CHART), *values, "--set=router.replicas=1")
    assert code != 0
    assert "pre-upgrade hook" in said
    assert server.call("GET", f"/apis/apps/v1/namespaces/{namespace}/deployments/aerostat-router")["spec"]["replicas"] == 3, (
        "nothing changed"
    )

    assert helm(server, chart, namespace, "uninstall", "aerostat")[0] == 0
    assert seen(server) == ("0.0.9", fields | {"future"}), "CRDs stay"
