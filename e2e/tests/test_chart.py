"""The chart as helm renders it, checked against a real API server: every object is accepted, every pod as tight as it can be."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from aerostat_agent import settings as agent
from aerostat_agent.keeper import main as keeper
from aerostat_core.errors import SettingError
from aerostat_core.resources import Resource
from aerostat_operator import crds
from aerostat_operator import settings as operator
from aerostat_router import settings as router
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.chart import CHART, CLUSTER_WIDE, Chart, ChartError, pod_template
from aerostat_testing.kubernetes.operators import MERGE

pytestmark = pytest.mark.cluster

EXAMPLES = {"default": (), **{path.name.removesuffix("-values.yaml"): (path,) for path in sorted((CHART / "ci").glob("*.yaml"))}}
FILES = pytest.mark.parametrize("values", EXAMPLES.values(), ids=EXAMPLES)
Values = tuple[Path, ...]


def of_kind(objects: list[Resource], kind: str) -> list[Resource]:
    return [o for o in objects if o["kind"] == kind]


def pods(objects: list[Resource]) -> Iterator[tuple[str, Resource]]:
    """Component and pod template."""
    for o in objects:
        if template := pod_template(o):
            yield o["metadata"]["labels"]["app.kubernetes.io/component"], template


def namespace_object(name: str) -> Resource:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


@FILES
def test_it_lints(chart: Chart, values: Values) -> None:
    chart.lint(*values)


@FILES
def test_the_api_server_accepts_every_object(chart: Chart, apiserver: ApiServer, namespace: str, values: Values) -> None:
    objects = chart.render(*values, namespace=namespace)
    for needed in sorted({o["metadata"].get("namespace", namespace) for o in objects}):
        apiserver.kubectl("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump(namespace_object(needed)))
    command = ("apply", "--dry-run=server", "--server-side", "--validate=strict", "--filename=-")
    said = apiserver.kubectl(*command, stdin=yaml.safe_dump_all(objects))
    assert said.count("(server dry run)") == len(objects), said


@FILES
def test_objects_have_the_labels_and_a_namespace(chart: Chart, values: Values) -> None:
    for o in chart.render(*values, namespace="serving"):
        labels = o["metadata"]["labels"]
        wanted = {f"app.kubernetes.io/{part}" for part in ("name", "instance", "version", "component", "part-of", "managed-by")}
        assert wanted <= labels.keys(), o["metadata"]["name"]
        assert ("namespace" in o["metadata"]) != (o["kind"] in CLUSTER_WIDE), o["metadata"]["name"]
        if o["kind"] in CLUSTER_WIDE:
            assert o["metadata"]["name"].endswith(".serving"), "two releases must not meet"


@FILES
def test_selectors_find_their_own_pods_only(chart: Chart, values: Values) -> None:
    objects = chart.render(*values, namespace="serving")
    all_labels = [(o["metadata"]["name"], template["metadata"]["labels"]) for o in objects if (template := pod_template(o))]
    for o in of_kind(objects, "Deployment") + of_kind(objects, "DaemonSet"):
        selector = o["spec"]["selector"]["matchLabels"].items()
        assert [name for name, labels in all_labels if selector <= labels.items()] == [o["metadata"]["name"]]


@FILES
@pytest.mark.parametrize("pod_ip", ["10.0.0.7", "fd00::7"])
def test_processes_know_their_flags(chart: Chart, tmp_path: Path, values: Values, pod_ip: str) -> None:
    """Each container's arguments go through the parser of its own program."""
    parsers: dict[str, Any] = {"operator": operator, "crds": crds, "router": router, "agent": agent, "engines": keeper}
    seen = set()
    for component, template in pods(chart.render(*values, namespace="serving")):
        (container,) = template["spec"]["containers"]
        filled = {"$(POD_NAME)": "aerostat-router-7d9f-x2x4", "$(POD_IP)": pod_ip, "$(NODE_NAME)": "node-1"}
        arguments = container["args"]
        for variable, value in filled.items():
            arguments = [argument.replace(variable, value) for argument in arguments]
        assert "$(" not in " ".join(arguments)
        arguments = [argument.replace("=/run/aerostat", f"={tmp_path}") for argument in arguments]
        parsers[component].parse_settings(arguments)
        with pytest.raises((SystemExit, SettingError)):
            parsers[component].parse_settings([*arguments, "--unheard-of"])
        seen.add(component)
    assert seen == set(parsers)


@FILES
def test_containers_may_do_as_little_as_possible(chart: Chart, values: Values) -> None:
    for component, template in pods(chart.render(*values, namespace="serving")):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec.get("automountServiceAccountToken") is (False if component == "engines" else None)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in spec["containers"] + spec.get("initContainers", []):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["requests"]
            assert "memory" in container["resources"]["limits"]
            may_add = ["CHOWN", "FOWNER"] if container["name"] == "folders" else None
            assert security["capabilities"].get("add") == may_add


@FILES
def test_operator_and_router_run_under_restricted_pod_security(chart: Chart, apiserver: ApiServer, namespace: str, values: Values) -> None:
    """Node pods do not, nor under `baseline`: a namespace labelled `privileged` takes them."""

    def enforce(level: str) -> None:
        labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": level}}}
        apiserver.call("PATCH", f"/api/v1/namespaces/{namespace}", labels, content_type=MERGE)

    objects = chart.render(*values, namespace=namespace)
    for account in of_kind(objects, "ServiceAccount"):
        account["metadata"].pop("namespace")
        apiserver.call("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    for component, template in pods(objects):
        template["spec"].pop("priorityClassName", None)  # that of critical pods has a quota of its own
        template["spec"].pop("runtimeClassName", None)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
        create = ("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
        enforce("restricted")
        if component not in ("agent", "engines"):
            apiserver.call(*create)
            continue
        for level in ("restricted", "baseline"):
            enforce(level)
            with pytest.raises(httpx.HTTPStatusError) as refused:
                apiserver.call(*create)
            assert "hostPath" in refused.value.response.text, "node pods use folders of the host, which needs a namespace for that"
        enforce("privileged")
        apiserver.call(*create)


def test_the_devices_of_a_node_are_requested(chart: Chart) -> None:
    objects = chart.render(*EXAMPLES["gpu"], namespace="serving")
    (engines,) = (o for o in of_kind(objects, "DaemonSet") if o["metadata"]["name"] == "aerostat-engines-h200")
    spec = engines["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"memory": "1Ti", "nvidia.com/gpu": 8}
    assert container["resources"]["requests"] == {"cpu": "32", "memory": "1Ti", "nvidia.com/gpu": 8}
    assert container["image"] == "registry.example.com/llm/aerostat/engines-cuda:0.1.0"
    assert spec["runtimeClassName"] == "nvidia"
    assert engines["spec"]["updateStrategy"] == {"type": "OnDelete"}
    (agents,) = (o for o in of_kind(objects, "DaemonSet") if o["metadata"]["name"] == "aerostat-agent-h200")
    assert "nvidia.com/gpu" not in str(agents["spec"]["template"]["spec"]["containers"])
    for part in ("nodeSelector", "tolerations"):
        assert agents["spec"]["template"]["spec"][part] == spec[part], "both pods of a node go to the same nodes"


def test_each_node_pool_has_its_pair(chart: Chart) -> None:
    objects = chart.render(*EXAMPLES["two-pools"], namespace="serving")
    names = {(o["metadata"]["namespace"], o["metadata"]["name"]) for o in of_kind(objects, "DaemonSet")}
    assert names == {("aerostat-nodes", f"aerostat-{component}-{pool}") for component in ("engines", "agent") for pool in ("cpu", "l40s")}


def test_who_watches_one_namespace_has_rights_there_only(chart: Chart) -> None:
    objects = chart.render(*EXAMPLES["two-pools"], namespace="serving")
    assert {role["metadata"]["namespace"] for role in of_kind(objects, "Role")} == {"models", "serving", "aerostat-nodes"}
    nodes, _ = sorted(of_kind(objects, "ClusterRole"), key=lambda role: "crds" in role["metadata"]["name"])
    assert nodes["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}]
    for component, template in pods(objects):
        if component not in ("engines", "crds"):
            assert "--cluster=kubernetes:?namespace=models" in template["spec"]["containers"][0]["args"]


def test_secrets_are_read_where_the_values_say(chart: Chart) -> None:
    """Any of a namespace, that is."""

    def readers(objects: list[Resource]) -> list[tuple[str, str, list[str]]]:
        rules = [(o, rule) for o in objects for rule in o.get("rules") or () if "secrets" in rule["resources"] or "*" in str(rule)]
        rules = [(o, rule) for o, rule in rules if "resourceNames" not in rule]
        return [(o["kind"], o["metadata"]["namespace"], rule["verbs"]) for o, rule in rules]

    assert readers(chart.render(namespace="serving")) == []
    objects = chart.render(namespace="serving", settings={"modelSecrets.namespaces": ["team-a", "team-b"]})
    assert readers(objects) == [("Role", "team-a", ["get"]), ("Role", "team-b", ["get"])]


def test_parts_see_the_files_of_certificates_that_are_theirs(chart: Chart) -> None:
    objects = chart.render(*EXAMPLES["two-pools"], namespace="serving")
    made = {o["metadata"]["name"]: o for o in of_kind(objects, "Secret")}
    assert {name: o["metadata"]["namespace"] for name, o in made.items()} == {
        "aerostat-ca": "serving",
        "aerostat-router-tls": "serving",
        "aerostat-agent-tls": "aerostat-nodes",
        "aerostat-engines-tls": "aerostat-nodes",
    }
    for component, template in pods(objects):
        spec = template["spec"]
        (container,) = spec["containers"]
        mounted = {v["secret"]["secretName"]: v["secret"] for v in spec["volumes"] if "secret" in v}
        if component == "operator":
            (kept,) = (a for a in container["args"] if a.startswith("--tls-secrets="))
            assert sorted(name.rpartition("/")[2] for name in kept.split(",")) == sorted(made)
        if component in ("operator", "crds"):
            assert not mounted
            continue
        (volume,) = mounted.values()
        assert list(mounted) == [f"aerostat-{component}-tls"]
        assert [item["key"] for item in volume["items"]] == ["tls.crt", "tls.key", "ca.crt"], "a pod waits for all three"
        assert volume["defaultMode"] == 0o440
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"], "so that our id may read the key"
        assert {"name": "tls", "mountPath": "/etc/aerostat/tls", "readOnly": True} in container["volumeMounts"]
        assert "--tls-dir=/etc/aerostat/tls" in container["args"]


def test_secrets_say_nothing_of_their_data(chart: Chart) -> None:
    """So that nobody but the operator owns it."""
    for secret in of_kind(chart.render(namespace="serving"), "Secret"):
        assert secret.keys() == {"apiVersion", "kind", "metadata", "type"}


def test_without_tls_nothing_of_it_is_there(chart: Chart) -> None:
    objects = chart.render(namespace="serving", settings={"tls.enabled": False})
    assert not of_kind(objects, "Secret")
    assert "tls" not in str([template for _, template in pods(objects)])
    assert "fsGroup" not in str(objects)
    assert "secrets" not in str([o.get("rules") for o in objects])


def test_engines_have_the_environment_of_the_values(chart: Chart) -> None:
    for component, template in pods(chart.render(namespace="serving", settings={"engines.env": {"HF_ENDPOINT": "https://h"}})):
        (container,) = template["spec"]["containers"]
        assert ({"name": "HF_ENDPOINT", "value": "https://h"} in container["env"]) is (component == "engines")


def test_volumes_of_the_values_are_read_by_engines_only_and_the_limit_is_the_agents(chart: Chart) -> None:
    for component, template in pods(chart.render(*EXAMPLES["air-gapped"], namespace="serving")):
        (container,) = template["spec"]["containers"]
        is_mounted = {"name": "models", "mountPath": "/models", "readOnly": True} in container.get("volumeMounts", [])
        volume = {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
        assert is_mounted == (volume in template["spec"].get("volumes", [])) == (component == "engines")
        assert ("--model-cache-limit=500Gi" in container["args"]) is (component == "agent")
    for path in ("/var/cache/aerostat", "/tmp/x", "models"):
        with pytest.raises(ChartError, match="mountPath"):
            chart.render(namespace="serving", settings={"nodes.extraVolumeMounts": [{"name": "models", "mountPath": path}]})


def test_optional_apis_are_used_where_they_are(chart: Chart) -> None:
    assert not of_kind(chart.render(namespace="serving"), "ServiceMonitor")
    values, apis = EXAMPLES["two-pools"], ("monitoring.coreos.com/v1/ServiceMonitor",)
    objects = chart.render(*values, namespace="serving", apis=apis)
    (monitor,) = of_kind(objects, "ServiceMonitor")
    assert monitor["spec"]["namespaceSelector"]["matchNames"] == ["serving", "aerostat-nodes"]
    selected = [
        s for s in of_kind(objects, "Service") if monitor["spec"]["selector"]["matchLabels"].items() <= s["metadata"]["labels"].items()
    ]
    assert [s["metadata"]["namespace"] for s in selected] == ["serving", "aerostat-nodes"]
    assert not of_kind(chart.render(namespace="serving", apis=apis, settings={"serviceMonitor.enabled": False}), "ServiceMonitor")


def test_a_drain_fits_into_the_time_a_pod_has_to_end(chart: Chart) -> None:
    objects = chart.render(namespace="serving", settings={"router.drainSeconds": 300, "engines.graceSeconds": 90})
    grace = {component: template["spec"].get("terminationGracePeriodSeconds") for component, template in pods(objects)}
    assert grace["router"] >= 300 + 5 + 10
    assert grace["engines"] >= 90 + 10


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"router.replica": 3}, "additional properties 'replica' not allowed"),
        ({"unheardOf": 1}, "additional properties 'unheardOf' not allowed"),
        ({"router.replicas": "three"}, "got string, want integer"),
        ({"router.ingress.enabled": True}, "/router/ingress/host"),
        ({"nodePools[0].nodeSelector": {}}, "/nodeSelector"),
        ({"nodes.runDir": "run"}, "/nodes/runDir"),
        ({"modelSecrets.namespaces": ["*"]}, "/modelSecrets/namespaces/0"),
        ({"modelSecrets.namespaces": [""]}, "/modelSecrets/namespaces/0"),
        ({"engines.env": {"A B": "c"}}, "additional properties 'A B' not allowed"),
        ({"podSecurity.user": 0}, "/podSecurity/user"),
        ({"image.pullPolicy": "Sometimes"}, "/image/pullPolicy"),
    ],
)
def test_a_wrong_value_is_refused_by_name(chart: Chart, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ChartError) as refused:
        chart.render(namespace="serving", settings=settings)
    assert said in str(refused.value)


@FILES
def test_the_notes_say_where_to_call(chart: Chart, values: Values) -> None:
    notes = chart.notes(*values, namespace="serving")
    wanted = "https://llm.example.com/v1" if values == EXAMPLES["ingress"] else "http://aerostat.serving:8080/v1"
    assert f"Clients call {wanted}" in notes


def test_a_long_release_name_still_gives_names_that_fit(chart: Chart) -> None:
    for o in chart.render(namespace="n" * 63, release="r" * 53):
        assert len(o["metadata"]["name"]) <= (253 if o["kind"] in CLUSTER_WIDE or "Set" in o["kind"] else 63), o["metadata"]["name"]
