"""The API server of the suite: our CRDs and samples are accepted, tokens are real, and it comes and goes as told."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from aerostat_core.ids import NamespacedName
from aerostat_testing.kubernetes.apiserver import CRDS, ApiServer
from aerostat_testing.kubernetes.build import Programs
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.cluster

SAMPLES = sorted((CRDS / "samples").rglob("*.yaml"))
NAMES = {"models.aerostat.dev", "pools.aerostat.dev", "slos.aerostat.dev", "instances.aerostat.dev"}


def test_server_and_client_say_the_version_that_was_built(apiserver: ApiServer) -> None:
    told = json.loads(apiserver.kubectl("version", "--output=json"))
    assert told["serverVersion"]["gitVersion"] == f"v{apiserver.programs.version}"
    assert told["clientVersion"]["gitVersion"] == f"v{apiserver.programs.version}"


def test_a_port_that_somebody_took_meanwhile_is_left_to_them(apiserver: ApiServer, tmp_path: Path) -> None:
    late = ApiServer(tmp_path, apiserver.programs)
    wanted = late.port
    with socket.create_server(("127.0.0.1", wanted)), late:
        assert late.port != wanted
        assert late.is_ready()
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert logs
    assert not any("address already in use" in log for log in logs), "of the try that counts"


def test_all_crds_are_accepted_without_a_warning(apiserver: ApiServer) -> None:
    installed = apiserver.call("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions")["items"]
    assert {crd["metadata"]["name"] for crd in installed} == NAMES
    for crd in installed:
        conditions = {condition["type"]: condition["status"] for condition in crd["status"]["conditions"]}
        assert conditions["Established"] == "True"
        assert conditions["NamesAccepted"] == "True"
        assert conditions.get("NonStructuralSchema", "False") == "False"
    apiserver.kubectl("apply", "--server-side", "--warnings-as-errors", "--dry-run=server", "--filename", str(CRDS))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: str(path.relative_to(CRDS)))
def test_every_sample_is_accepted(apiserver: ApiServer, namespace: str, sample: Path) -> None:
    n_objects = sum(1 for document in yaml.safe_load_all(sample.read_text()) if document)
    arguments = ("apply", "--dry-run=server", "--validate=strict", "--warnings-as-errors", "--namespace", namespace)
    told = apiserver.kubectl(*arguments, "--filename", str(sample))
    assert told.count("created (server dry run)") == n_objects


def test_what_a_rule_forbids_is_refused_in_its_own_words(apiserver: ApiServer, namespace: str) -> None:
    slo = {"apiVersion": "aerostat.dev/v1alpha1", "kind": "SLO", "metadata": {"name": "a"}, "spec": {"ttft": "0s", "tpot": "1s"}}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        apiserver.kubectl("apply", "--namespace", namespace, "--filename", "-", stdin=json.dumps(slo))
    assert "must be more than 0 and at most 10m" in refused.value.stderr


def test_a_service_account_may_do_what_its_rules_say_and_no_more(apiserver: ApiServer, namespace: str) -> None:
    rules = [{"apiGroups": ["aerostat.dev"], "resources": ["models"], "verbs": ["get", "list"]}]
    kubeconfig = apiserver.kubeconfig_for(NamespacedName(namespace, "reader"), rules)
    assert f"system:serviceaccount:{namespace}:reader" in apiserver.kubectl("auth", "whoami", kubeconfig=kubeconfig)
    apiserver.kubectl("get", "models", "--namespace", namespace, kubeconfig=kubeconfig)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        apiserver.kubectl("get", "pools", "--namespace", namespace, kubeconfig=kubeconfig)
    assert "cannot list resource" in refused.value.stderr


def test_it_comes_back_with_its_objects_identity_and_port(apiserver: ApiServer, namespace: str) -> None:
    rules = [{"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get"]}]
    kubeconfig = apiserver.kubeconfig_for(NamespacedName(namespace, "stays"), rules)
    for end in (apiserver.kill, apiserver.stop):
        end()
        with pytest.raises(AssertionError, match="is not running"):
            apiserver.is_ready()
        apiserver.start()
        assert namespace in apiserver.kubectl("get", "namespace", namespace, kubeconfig=kubeconfig)


def test_nothing_of_it_outlives_the_process_that_started_it(apiserver: ApiServer, tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, time\n"
        "from aerostat_testing.kubernetes.apiserver import ApiServer\n"
        "from aerostat_testing.kubernetes.build import Programs\n"
        "programs = Programs(version='', kubernetes=pathlib.Path(sys.argv[1]), etcd=pathlib.Path(sys.argv[2]))\n"
        "with ApiServer(pathlib.Path(sys.argv[3]), programs):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    built: Programs = apiserver.programs
    command = [sys.executable, "-c", script, str(built.kubernetes), str(built.etcd), str(tmp_path / "server")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        family = psutil.Process(owner.pid).children(recursive=True)
        assert {process.name() for process in family} == {"etcd", "kube-apiserver"}
        owner.kill()
        owner.wait(10)
    wait_for(lambda: not any(process.is_running() for process in family), "etcd and the API server are gone")
    secrets = [path for path in (tmp_path / "server").iterdir() if path.is_file()]
    assert secrets
    assert (tmp_path / "server").stat().st_mode & 0o077 == 0, "its tokens are for its owner only"
