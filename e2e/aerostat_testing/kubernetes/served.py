"""Aerostat over a real API server, as the chart has it: every process with the arguments and the rights of its container.

What a container has of its own (network, folders, the token's file) is this machine's, so ports and paths are put in. There is no
kubelet that would mount Secrets, so parts call each other without TLS.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from aerostat_core.ids import Seconds
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.chart import Chart
from aerostat_testing.kubernetes.installed import Installed, install
from aerostat_testing.kubernetes.kubelet import Pod, command
from aerostat_testing.kubernetes.operators import objects, only_node
from aerostat_testing.ports import free_port
from aerostat_testing.served import Router, Served, ends_of
from aerostat_testing.waiting import wait_for

START_LIMIT: Final[Seconds] = 60.0
_LISTEN: Final = re.compile(r"(--(?:[a-z]+-)?listen=).*:[0-9]+")
_PLURALS: Final = {Kind.MODEL: "models", Kind.POOL: "pools", Kind.SLO: "slos", Kind.INSTANCE: "instances"}
# Routers drain while their engines still run; the keeper goes last and ends the engines.
_STAGES: Final = {"router": 0, "operator": 0, "agent": 1, "engines": 2}
_GRACE: Final[Seconds] = 20.0


class ServedOnKubernetes(Served):
    """In a namespace of its own, on one node."""

    node = "node1"

    def __init__(self, root: Path, server: ApiServer, chart: Chart, *, model_cache: Path | None = None) -> None:
        super().__init__()
        self.server = server
        self.output = root / "output.txt"
        self._root = root
        self._model_cache = model_cache or root / "models"
        self._run_dir = Path(tempfile.mkdtemp(prefix="ae-"))  # short, since the paths of Unix sockets are
        only_node(server, self.node)
        self.installed: Installed = install(chart, server, self.node, one_namespace=True, reads_secrets=True, tls=False)
        self.namespace = self.installed.watched
        self._declared: dict[str, list[dict[str, Any]]] = {}
        self._routers: list[Router] = []

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self._run_dir)

    def start(self, *, n_routers: int = 1, n_operators: int = 1) -> None:
        pods = [self._pod("engines", self.node), self._pod("agent", self.node, node=self.node)]
        pods += [self._pod("operator", str(i)) for i in range(n_operators)]
        for i in range(n_routers):
            pods.append(router := self._pod("router", str(i)))
            http, grpc, admin = (_value(router, flag) for flag in ("--listen", "--grpc-listen", "--admin-listen"))
            self._routers.append(Router(http=http, grpc=grpc, admin=admin))
        argv = command(self._root, pods, os.getpid())
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        wait_for(self._is_listening, "the routers listen", limit=START_LIMIT)

    def stop(self) -> int:
        """As when all pods are deleted."""
        self.send(signal.SIGTERM)
        return self.wait()

    def write(self, name: str, *objects: dict[str, Any]) -> None:
        kept = {(o["kind"], o["metadata"]["name"]) for o in objects}
        self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(objects))
        for old in self._declared.get(name, ()):
            if (old["kind"], old["metadata"]["name"]) not in kept:
                self._delete(old)
        self._declared[name] = list(objects)

    def remove(self, name: str) -> None:
        for old in self._declared.pop(name):
            self._delete(old)

    def refusal(self, name: str, text: str) -> str:
        try:
            self.kubectl("apply", "--filename=-", stdin=text)
        except subprocess.CalledProcessError as error:
            return str(error.stderr)
        raise AssertionError(f"the API server took what {name} is not to say:\n{text}")

    def objects(self, kind: Kind) -> dict[str, dict[str, Any]]:
        return objects(self.server, self.namespace, _PLURALS[kind])

    def table(self, what: str) -> list[list[str]]:
        return [line.split() for line in self.kubectl("get", what).splitlines()]

    def user_kubeconfig(self) -> Path:
        """A file for the admin whose commands are about the namespace that is watched."""
        return self.server.kubeconfig(namespace=self.namespace)

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        return self.server.kubectl("--namespace", self.namespace, *arguments, stdin=stdin)

    @property
    def routers(self) -> list[Router]:
        return self._routers

    def logs(self, n_bytes: int = 3000) -> str:
        return ends_of([*self._root.glob("*.log"), *(self._run_dir / "logs").rglob("*.log")], n_bytes)

    def _delete(self, declared: dict[str, Any]) -> None:
        self.kubectl("delete", declared["kind"], declared["metadata"]["name"], "--timeout=20s")

    def _pod(self, component: str, suffix: str, *, node: str | None = None) -> Pod:
        name = f"{component}-{suffix}"
        facts = {"$(NODE_NAME)": self.node, "$(POD_NAME)": name, "$(POD_IP)": "127.0.0.1"}
        facts |= {"/run/aerostat": str(self._run_dir), "/var/cache/aerostat": str(self._model_cache), "python3 ": f"{sys.executable} "}
        if component != "engines":
            facts[f"--cluster={self.installed.url}"] = f"--cluster={self.installed.cluster_url(component, node=node)}"
        argv = _on_this_machine(self.installed.container(component), facts)
        return Pod(name=name, argv=argv, log=str(self._root / f"{name}.log"), grace=_GRACE, stage=_STAGES[component])

    def _is_listening(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"it ended:\n{self.said}\n{self.logs()}"
        try:
            return all(httpx.get(f"http://{r.admin}/healthz", timeout=5.0).is_success for r in self._routers)
        except httpx.TransportError:
            return False


def _on_this_machine(container: Mapping[str, Any], facts: Mapping[str, str]) -> tuple[str, ...]:
    """The container's command line with what is known of its pod, and each listener on a free port."""
    arguments: list[str] = container["args"]
    for written, meant in facts.items():
        arguments = [argument.replace(written, meant) for argument in arguments]
    arguments = [_LISTEN.sub(lambda flag: f"{flag[1]}127.0.0.1:{free_port()}", argument) for argument in arguments]
    return sys.executable, *container["command"][1:], *arguments


def _value(pod: Pod, flag: str) -> str:
    (argument,) = (a for a in pod.argv if a.startswith(f"{flag}="))
    return argument.partition("=")[2]
