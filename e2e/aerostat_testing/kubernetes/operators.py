"""The operator as a process over a test's API server, and what it needs around it: a node, and an agent that only reports."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from aerostat_core.ids import Seconds
from aerostat_operator.policy.statuses import format_time
from aerostat_runtime.clock import SystemClock
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.logs import last_lines
from aerostat_testing.ports import free_port
from aerostat_testing.waiting import wait_for

API: Final = "/apis/aerostat.dev/v1alpha1"
MERGE: Final = "application/merge-patch+json"
LEASE_DURATION: Final[Seconds] = 4.0
READY_LIMIT: Final[Seconds] = 60.0
STOP_LIMIT: Final[Seconds] = 20.0


class OperatorProcess:
    """Context manager. `kubeconfig`: who it is, the admin unless told. Watches `namespace` only, and its Lease is there, unless told."""

    def __init__(
        self,
        server: ApiServer,
        namespace: str,
        log: Path,
        *,
        kubeconfig: Path | None = None,
        everywhere: bool = False,
        lease: str | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self._port = free_port()
        self.log = log
        within = "" if everywhere else f"&namespace={namespace}"
        cluster = f"kubernetes:?kubeconfig={kubeconfig or server.kubeconfig()}{within}"
        command = [sys.executable, "-m", "aerostat_operator", "--cluster", cluster, "--lease", lease or f"{namespace}/aerostat-operator"]
        command += [
            "--lease-duration",
            str(LEASE_DURATION),
            "--listen",
            f"127.0.0.1:{self._port}",
            "--url",
            "http://routers/v1",
            *arguments,
        ]
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"{self.log} ends:\n{last_lines(self.log)}")
        self.kill()

    def ready(self) -> Self:
        wait_for(lambda: self.get("/readyz") == "ok\n", "the operator is ready", limit=READY_LIMIT)
        return self

    def leading(self) -> Self:
        wait_for(self.is_leading, "this replica leads", limit=READY_LIMIT)
        return self

    def is_leading(self) -> bool:
        return self.metric("aerostat_operator_leading") == 1.0

    def get(self, path: str) -> str:
        """Empty while it does not listen."""
        assert self._process.poll() is None, f"the operator has ended with {self._process.returncode}"
        try:
            return httpx.get(f"http://127.0.0.1:{self._port}{path}", timeout=5.0, trust_env=False).text
        except httpx.TransportError:
            return ""

    def metric(self, name: str) -> float:
        """The sum over its labels; 0 where it is not there."""
        samples = [line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(value) for _, value in samples)

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_LIMIT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(STOP_LIMIT)

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)


def add_node(server: ApiServer, name: str) -> None:
    """A Node that is ready; one that is there already stays."""
    try:
        server.call("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.CONFLICT:
            raise
    condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    now = format_time(SystemClock().wall())
    status = {"conditions": [condition | {"lastHeartbeatTime": now, "lastTransitionTime": now}]}
    server.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, content_type=MERGE)


def only_node(server: ApiServer, name: str) -> None:
    """`add_node`, and what other tests of this server left goes: a Pool has an Instance of every node, of a lost one too."""
    for node in server.call("GET", "/api/v1/nodes")["items"]:
        if (other := node["metadata"]["name"]) != name:
            server.delete(f"/api/v1/nodes/{other}")
    add_node(server, name)


def objects(server: ApiServer, namespace: str, plural: str) -> dict[str, dict[str, Any]]:
    found = server.call("GET", f"{API}/namespaces/{namespace}/{plural}")["items"]
    return {item["metadata"]["name"]: item for item in found}


def report_open(server: ApiServer, namespace: str) -> None:
    """What agents say when everything runs that shall."""
    for name, instance in objects(server, namespace, "instances").items():
        models = [{"name": m["name"], "generation": m["generation"], "state": "Open"} for m in instance["spec"]["models"]]
        status = {"agentEpoch": 1, "heartbeat": format_time(SystemClock().wall()), "agentAddress": "127.0.0.1:1", "models": models}
        path = f"{API}/namespaces/{namespace}/instances/{name}/status"
        server.call("PATCH", path, {"status": status}, content_type=MERGE)


def events(server: ApiServer, namespace: str) -> list[tuple[str, str, int]]:
    """(object, reason, how often it was told)."""
    return sorted((e["regarding"]["name"], e["reason"], (e.get("series") or {}).get("count", 1)) for e in _events(server, namespace))


def event_notes(server: ApiServer, namespace: str) -> list[tuple[str, str, str]]:
    """(object, reason, words)."""
    return sorted((e["regarding"]["name"], e["reason"], e["note"]) for e in _events(server, namespace))


def _events(server: ApiServer, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.call("GET", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")["items"]
    return found
