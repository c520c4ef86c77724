"""What the values say of pods: where they run, what they ask of a node, and which sizes are refused since they do not fit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerostat_core.resources import Resource
from aerostat_testing.kubernetes.chart import CHART, Chart, ChartError, pod_template

pytestmark = pytest.mark.cluster

DRA = CHART / "ci/dra-values.yaml"
POOL: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())["nodePools"][0]
GPU = "nvidia.com/gpu"
CLAIM = {"deviceClassName": "gpu.nvidia.com", "count": 8}


def pools(*changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with the default pool, changed; several of them."""
    return {"nodePools": [POOL | change for change in changes]}


def resources(*, requests: dict[str, Any] | None = None, limits: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"requests": POOL["resources"]["requests"] | (requests or {}), "limits": POOL["resources"]["limits"] | (limits or {})}


def templates(objects: list[Resource], component: str) -> Iterator[Resource]:
    for o in objects:
        if (template := pod_template(o)) and o["metadata"]["labels"]["app.kubernetes.io/component"] == component:
            yield template


def spec_of(objects: list[Resource], component: str) -> Resource:
    (template,) = templates(objects, component)
    spec: Resource = template["spec"]
    return spec


def test_devices_are_claimed_from_a_driver_where_the_values_say_so(chart: Chart) -> None:
    objects = chart.render(DRA, namespace="serving")
    (claims,) = (o for o in objects if o["kind"] == "ResourceClaimTemplate")
    (request,) = claims["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"}
    engines = spec_of(objects, "engines")
    assert engines["resourceClaims"] == [{"name": "devices", "resourceClaimTemplateName": claims["metadata"]["name"]}]
    assert claims["metadata"]["namespace"] == "aerostat-nodes", "where its pods are"
    assert engines["containers"][0]["resources"]["claims"] == [{"name": "devices"}]
    assert "resourceClaims" not in spec_of(objects, "agent")
    (counted,) = (
        o for o in chart.render(namespace="serving", settings=pools({"devices": {"claim": CLAIM}})) if o["kind"] == claims["kind"]
    )
    assert counted["spec"]["spec"]["devices"]["requests"][0]["exactly"] == CLAIM


def test_nodes_without_devices_claim_none(chart: Chart) -> None:
    objects = chart.render(namespace="serving")
    assert not [o for o in objects if o["kind"] == "ResourceClaimTemplate"]
    assert spec_of(objects, "engines")["containers"][0]["resources"] == POOL["resources"]


def test_pods_run_where_and_as_the_values_say(chart: Chart) -> None:
    objects = chart.render(DRA, namespace="serving")
    values = yaml.safe_load(DRA.read_text())
    (pool,) = values["nodePools"]
    for component, placed in (("operator", values["operator"]), ("crds", values["operator"]), ("agent", pool), ("engines", pool)):
        assert spec_of(objects, component)["affinity"].items() >= placed["affinity"].items(), component
    for component in ("operator", "router"):
        apart = spec_of(objects, component)["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert [term["podAffinityTerm"]["topologyKey"] for term in apart] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    assert [spec_of(objects, c).get("runtimeClassName") for c in ("router", "engines", "agent")] == ["sandboxed", "nvidia", None]
    for component in ("operator", "agent", "engines"):
        (template,) = templates(objects, component)
        assert template["metadata"]["labels"].items() >= {"example.com/team": "serving", "app.kubernetes.io/component": component}.items()
    (agent,) = templates(objects, "agent")
    assert agent["metadata"]["annotations"] == {"example.com/note": "decides"}
    for component in ("operator", "agent", "router"):
        names = [entry["name"] for entry in spec_of(objects, component)["containers"][0]["env"]]
        assert len(set(names)) == len(names)
        assert set(values[component]["env"]) <= set(names)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            pools({"devices": {"resource": GPU, "count": 8, "claim": CLAIM}}),
            "nodePools[default].devices: resource nvidia.com/gpu and claim of",
        ),
        (pools({"devices": {"resource": GPU}}), "resource nvidia.com/gpu needs count, the number of devices"),
        (pools({"devices": {"count": 8}}), "count 8 says how many, and resource not of what; set resource"),
        (pools({"devices": {"claim": {"deviceClassName": "gpu.nvidia.com"}}}), "/devices/claim"),
        (pools({"devices": {"claim": {**CLAIM, "all": True}}}), "/devices/claim"),
        (
            pools({"devices": {"resource": GPU, "count": 8}, "resources": resources(limits={GPU: 4})}),
            "nvidia.com/gpu is in resources and in devices",
        ),
        (pools({"sharedMemory": "64Gi"}), "limits.memory 12Gi has no room for sharedMemory 64Gi and the 3Gi that"),
        (pools({"sharedMemory": "64Gi"}), "raise the limit to at least 67Gi, or lower sharedMemory"),
        (pools({"sharedMemory": "9.1Gi"}), "raise the limit to at least 13Gi"),
        (
            pools({"resources": resources(requests={"memory": "13Gi"})}),
            "nodePools[default].resources: requests.memory 13Gi is more than limits.memory",
        ),
        (pools({"resources": resources(requests={"cpu": "2"}, limits={"cpu": "1500m"})}), "requests.cpu 2 is more than limits.cpu 1500m"),
        (pools({"resources": resources(limits={"ephemeral-storage": "1G"})}), "limits.ephemeral-storage 1G is less than tmp 4Gi"),
        (pools({"tmp": "8Gi", "resources": resources(limits={"ephemeral-storage": "7Gi"})}), "less than tmp 8Gi"),
        (pools({}, {}), "nodePools[default]: two node pools have that name"),
        (
            {"router.resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}},
            "router.resources: requests.memory 2Gi is more",
        ),
        ({"router.resources": {"requests": {}, "limits": {"memory": None}}}, "/router/resources/limits"),
        (
            {"router.podLabels": {"app.kubernetes.io/component": "mine"}},
            "router.podLabels: app.kubernetes.io/component is one of the labels",
        ),
        ({"agent.env": {"NODE_NAME": "mine"}}, "agent.env: NODE_NAME is set by the chart; leave it out"),
        ({"crds.applied": True}, "additional properties 'applied' not allowed"),
        ({"nodes.modelCacheLimit": 500 << 30}, "/nodes/modelCacheLimit"),
        ({"nodes.modelCacheLimit": "500m"}, "/nodes/modelCacheLimit"),
        ({"nodes.extraVolumes": [{"name": "tls", "emptyDir": {}}]}, "/nodes/extraVolumes/0/name"),
        ({"modelSecrets.namespaces": ["team", "serving"]}, "modelSecrets.namespaces: in serving lie the keys of our certificates"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers_and_the_value_to_change(chart: Chart, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ChartError) as refused:
        chart.render(namespace="serving", settings=settings)
    assert said in str(refused.value)


def test_large_user_ids_are_written_as_they_are(chart: Chart) -> None:
    objects = chart.render(namespace="serving", settings={"podSecurity": {"user": 1000660000, "group": 1000660000}})
    for component in ("router", "agent", "engines"):
        assert spec_of(objects, component)["securityContext"]["runAsUser"] == 1000660000
    (folders,) = spec_of(objects, "engines")["initContainers"]
    assert folders["args"][:2] == ["--owner=1000660000", "--group=1000660000"]


@pytest.mark.parametrize(
    "settings",
    [
        pools({"sharedMemory": "9Gi"}),
        pools({"sharedMemory": 9 << 30}),
        pools({"resources": resources(requests={"cpu": "1500m", "memory": "12Gi"}, limits={"cpu": 2})}),
        pools({"resources": resources(limits={"ephemeral-storage": "4.5G"})}),
        {"nodePools": []},
    ],
)
def test_what_just_fits_is_taken(chart: Chart, settings: dict[str, Any]) -> None:
    assert chart.render(namespace="serving", settings=settings)


@pytest.mark.parametrize("other", [("second", "serving"), ("aerostat", "elsewhere")], ids=["another name", "another namespace"])
@pytest.mark.parametrize("values", [(), (DRA,)], ids=["default", "dra"])
def test_two_releases_of_a_cluster_have_no_object_in_common(chart: Chart, other: tuple[str, str], values: tuple[Path, ...]) -> None:
    def names(release: str, namespace: str) -> set[tuple[str, str, str]]:
        settings = {"nodes.namespace": f"{namespace}-nodes"}
        objects = chart.render(*values, release=release, namespace=namespace, settings=settings)
        return {(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]) for o in objects}

    assert not names("aerostat", "serving") & names(*other)


def test_the_notes_say_what_stays_after_an_uninstall_and_how_to_remove_it(chart: Chart) -> None:
    notes = chart.notes(namespace="serving")
    for command in ("helm uninstall aerostat --namespace serving", "kubectl delete models,pools,slos --all", "kubectl delete crd"):
        assert command in notes
    for folder in ("/run/aerostat", "/var/cache/aerostat"):
        assert folder in notes
