"""The images as pods of real nodes, with the rights and the file systems that the chart gives them."""

import json
from collections.abc import Mapping
from typing import Any, Final

import pytest

from aerostat_testing.kubernetes.build import NodePrograms
from aerostat_testing.kubernetes.chart import Chart
from aerostat_testing.kubernetes.images.build import REGISTRY, version
from aerostat_testing.kubernetes.images.buildah import Image
from aerostat_testing.kubernetes.installed import template_of
from aerostat_testing.kubernetes.nodes.cluster import Nodes
from aerostat_testing.kubernetes.nodes.namespace import NodesNamespace
from aerostat_testing.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long]

MOST_BYTES: Final = 300_000_000  # of an image without torch
COMPONENTS: Final = ("operator", "router", "agent", "engines")

CONDITIONS: Final = """
import json, os, pathlib
def can_write(path):
    try:
        pathlib.Path(path, "probe").write_text("")
    except OSError:
        return False
    return True
from importlib.metadata import distributions
names = {d.name.lower() for d in distributions()}
places = ["/", "/opt/aerostat", "/var", "/etc", "/tmp"]
print(json.dumps({
    "uid": os.getuid(),
    "home": os.path.expanduser("~"),
    "writable": [place for place in places if can_write(place)],
    "capabilities": next(line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")),
    "unwanted": sorted(names & {"pytest", "hatchling", "uv", "hypothesis", "mypy", "ruff"}),
    "ours": sorted(path.name for path in pathlib.Path(os.__file__).parent.glob("aerostat_testing")),
}))
"""

# Bytecode that is missing would be made at each start, since it cannot be kept.
ENGINES: Final = """
import json, pathlib, sys
import sglang, torch, triton
import sglang.srt.managers.scheduler
import aerostat_engine.launch
from importlib.metadata import entry_points
found = {e.value: e.load() for group in ("sglang.srt.platforms", "sglang.srt.plugins") for e in entry_points(group=group)}
files = {name: (vars(m).get("__file__"), vars(m).get("__cached__")) for name, m in sys.modules.items() if hasattr(m, "__dict__")}
compiled = {name: cached for name, (file, cached) in files.items() if isinstance(cached, str) and str(file).endswith(".py")}
print(json.dumps({
    "plugins": sorted(found),
    "version": sglang.__version__,
    "n_modules": len(compiled),
    "uncompiled": [name for name, cached in compiled.items() if not pathlib.Path(cached).exists()],
}))
"""


@pytest.fixture(scope="module")
def templates(found_node_programs: NodePrograms, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    """The chart's pod templates by component."""
    kubernetes = found_node_programs.control_plane.version
    chart = Chart(helm=found_node_programs.helm / "helm", kubernetes=kubernetes, home=tmp_path_factory.mktemp("helm"))
    rendered = chart.render(namespace="release", settings={"image.registry": REGISTRY})
    return {component: template_of(rendered, component) for component in COMPONENTS}


class Runs:
    """Containers of the chart that run another command, to its end."""

    def __init__(self, namespace: NodesNamespace, templates: Mapping[str, dict[str, Any]]) -> None:
        self._namespace, self._templates = namespace, templates

    def command(self, component: str) -> list[str]:
        found: list[str] = self._container(component)["command"]
        return found

    def image(self, component: str) -> str:
        found: str = self._container(component)["image"]
        return found

    def output(self, component: str, *command: str, limit: float = 120.0) -> str:
        spec = self._templates[component]["spec"]
        kept = {"securityContext": spec["securityContext"], "restartPolicy": "Never", "automountServiceAccountToken": False}
        chosen = {key: self._container(component)[key] for key in ("image", "imagePullPolicy", "securityContext")}
        environment = [entry for entry in self._container(component)["env"] if "value" in entry]
        container = {"name": "run", "command": list(command), "env": environment} | chosen
        container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": f"{component}-"},
            "spec": kept | {"containers": [container], "volumes": [{"name": "tmp", "emptyDir": {}}]},
        }
        made = self._namespace.kubectl("create", "--filename=-", "--output=name", stdin=json.dumps(pod)).strip()

        def phase() -> str:
            found = self._namespace.get(made)["status"].get("phase", "")
            return found if found in ("Succeeded", "Failed") else ""

        ended = wait_for(phase, f"{made} has ended", limit=limit)
        said = self._namespace.kubectl("logs", made)
        assert ended == "Succeeded", said
        return said

    def _container(self, component: str) -> dict[str, Any]:
        found: dict[str, Any] = self._templates[component]["spec"]["containers"][0]
        return found


@pytest.fixture
def runs(images: Mapping[str, Image], nodes_namespace: NodesNamespace, templates: Mapping[str, dict[str, Any]]) -> Runs:
    """In a namespace whose pods must be as restricted as those of operator and router."""
    label = "pod-security.kubernetes.io/enforce=restricted"
    nodes_namespace.nodes.kubectl("label", "namespace", nodes_namespace.name, label)
    return Runs(nodes_namespace, templates)


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_program_of_an_image_starts_as_the_chart_starts_it(runs: Runs, images: Mapping[str, Image], component: str) -> None:
    assert runs.image(component) == images[component].name
    assert "usage: " in runs.output(component, *runs.command(component), "--help")


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_container_may_write_nothing_but_its_temporary_folder(runs: Runs, component: str) -> None:
    told = json.loads(runs.output(component, "python3", "-c", CONDITIONS))
    assert told == {"uid": 10001, "home": "/tmp", "writable": ["/tmp"], "capabilities": "0" * 16, "unwanted": [], "ours": []}


def test_engines_have_sglang_with_our_plugin_and_all_of_it_compiled(runs: Runs) -> None:
    said = runs.output("engines", "python3", "-c", ENGINES, limit=300.0)
    told = json.loads(said.splitlines()[-1])
    assert told["plugins"] == ["aerostat_engine.plugin:platform", "aerostat_engine.plugin:register"]
    assert told["n_modules"] > 1000
    assert told["uncompiled"] == []


@pytest.mark.parametrize("module", ["aerostat_engine.prepare", "pip"])
def test_engines_have_what_the_agent_has_started_there(runs: Runs, module: str) -> None:
    assert "usage:" in runs.output("engines", "python3", "-m", module, "--help").lower()


def test_images_without_torch_are_small(images: Mapping[str, Image]) -> None:
    sizes = {component: image.n_bytes for component, image in images.items()}
    assert {component for component, n_bytes in sizes.items() if n_bytes > MOST_BYTES} == {"engines"}, sizes


def test_images_say_which_version_they_are(images: Mapping[str, Image]) -> None:
    for image in images.values():
        labels = json.loads(image.config)["config"]["Labels"]
        assert labels["org.opencontainers.image.version"] == version() == image.name.rpartition(":")[2]
        assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert labels["org.opencontainers.image.title"].startswith("aerostat ")


def test_nodes_share_the_layers_of_the_builder(nodes: Nodes, images: Mapping[str, Image]) -> None:
    """One copy of a large image on the machine, whatever the number of nodes."""
    layers = {layer.folder for image in images.values() for layer in image.layers}
    some_file = next(path for folder in layers for path in folder.rglob("libtorch_cpu.so"))
    assert some_file.stat().st_nlink >= 1 + len(nodes.names)


def test_a_node_that_lost_its_power_still_has_the_images(nodes: Nodes, runs: Runs) -> None:
    nodes.cut_power("node2")
    nodes.power_on("node2")
    nodes.wait_until_ready("node2")
    nodes.kubectl("cordon", "node1")
    try:
        assert "usage: " in runs.output("router", *runs.command("router"), "--help")
    finally:
        nodes.kubectl("uncordon", "node1")
