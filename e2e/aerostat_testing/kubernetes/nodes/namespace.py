"""A namespace of a test on the nodes, and what is kept of it when the test fails."""

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.client import is_true
from aerostat_testing.kubernetes.nodes.cluster import Nodes
from aerostat_testing.waiting import wait_for

_LIMIT: Final[Seconds] = 20.0


class NodesNamespace:
    def __init__(self, nodes: Nodes, name: str = "", *, labels: Mapping[str, str] | None = None) -> None:
        """Make one, in which pods can be created when it returns. Without a name it gets one of its own."""
        self.nodes = nodes
        named = {"name": name} if name else {"generateName": "test-"}
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {**named, "labels": dict(labels or {})}}
        created = nodes.kubectl("create", "--filename=-", "--output=name", stdin=yaml.safe_dump(body))
        self.name = created.strip().removeprefix("namespace/")
        wait_for(self._has_account, f"{self.name} has its ServiceAccount", limit=_LIMIT)

    def delete(self) -> None:
        """Its objects go soon after."""
        self.nodes.kubectl("delete", "namespace", self.name, "--wait=false")

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        return self.nodes.kubectl(f"--namespace={self.name}", *arguments, stdin=stdin)

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(objects))

    def get(self, *what: str) -> dict[str, Any]:
        return self.nodes.get(f"--namespace={self.name}", *what)

    def pods(self, app: str) -> list[dict[str, Any]]:
        """With that label, in the order of their names."""
        found: list[dict[str, Any]] = self.get("pods", f"--selector=app={app}")["items"]
        return found

    def ready_pods(self, app: str) -> list[dict[str, Any]]:
        return [pod for pod in self.pods(app) if is_true(pod, "Ready") and "deletionTimestamp" not in pod["metadata"]]

    def collect(self, folder: Path) -> None:
        """Objects, events and logs, into files there; where something cannot be had, its file says why."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "objects.yaml").write_text(_told(self._objects))
        (folder / "events.txt").write_text(_told(lambda: self.kubectl("get", "events", "--sort-by=.lastTimestamp", "--output=wide")))
        (folder / "pods.txt").write_text(_told(lambda: self.kubectl("describe", "pods")))
        for name, command in self._log_commands():
            (folder / name).write_text(_told(partial(self.kubectl, *command)))
        collect_nodes(self.nodes, folder)

    def _has_account(self) -> bool:
        try:
            return bool(self.kubectl("get", "serviceaccount", "default", "--output=name"))
        except subprocess.CalledProcessError:
            return False

    def _objects(self) -> str:
        kinds = self.nodes.kubectl("api-resources", "--verbs=list", "--namespaced", "--output=name").split()
        return self.kubectl("get", ",".join(kind for kind in kinds if not kind.startswith("events")), "--output=yaml")

    def _log_commands(self) -> Iterator[tuple[str, list[str]]]:
        try:
            pods = self.get("pods")["items"]
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return
        for pod in pods:
            name = pod["metadata"]["name"]
            for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                command = ["logs", name, f"--container={container['name']}", "--timestamps"]
                yield f"{name}-{container['name']}.log", command
                restarts = [s["restartCount"] for s in pod["status"].get("containerStatuses", ()) if s["name"] == container["name"]]
                if any(restarts):
                    yield f"{name}-{container['name']}-before.log", [*command, "--previous"]


def collect_nodes(nodes: Nodes, folder: Path) -> None:
    """What the nodes are like, and the logs of all programs that make the cluster."""
    (folder / "nodes.txt").write_text(_told(lambda: nodes.kubectl("describe", "nodes")))
    for log in nodes.logs():
        shutil.copy(log, folder / f"{log.relative_to(nodes.folder).parts[0]}-{log.name}")


def _told(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return f"{error}\n{error.stderr or ''!s}\n"
