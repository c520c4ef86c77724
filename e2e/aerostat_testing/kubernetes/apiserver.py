"""A Kubernetes API server with an etcd of its own: ready in seconds, and as easily killed, hung or restarted.

It has RBAC, admission and real ServiceAccount tokens, but no nodes, and no controllers unless asked for: without them
nothing collects garbage by owner reference, and a namespace that is deleted stays.
"""

import asyncio
import json
import os
import random
import secrets
import signal
import socket
import ssl
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import httpx

from aerostat_core.ids import NamespacedName, Seconds
from aerostat_testing.kubernetes.build import Programs
from aerostat_testing.kubernetes.client import COMMAND_LIMIT, run_kubectl, write_kubeconfig
from aerostat_testing.kubernetes.logs import last_lines
from aerostat_testing.leaks import OUTLIVES_TESTS
from aerostat_testing.tied import tied
from aerostat_testing.waiting import wait_for

READY_LIMIT: Final[Seconds] = 90.0
STOP_LIMIT: Final[Seconds] = 15.0
CALL_LIMIT: Final[Seconds] = 10.0
CRDS: Final = Path(__file__).resolve().parents[3] / "crds"
_KINDS: Final = ("models", "pools", "slos", "instances")
_API: Final = "/apis/aerostat.dev/v1alpha1"
# Below what the kernel hands out to outgoing connections, so that a port is still free when its server comes back.
_PORTS: Final = range(21000, 29000)
_TRIES: Final = 3
_IN_USE: Final = "address already in use"
_CONTROLLERS: Final = "garbage-collector-controller,namespace-controller,serviceaccount-controller"


class ApiServer:
    """Context manager. What is told to the server as admin goes through `call` and `kubectl`."""

    def __init__(self, folder: Path, programs: Programs) -> None:
        self.folder, self.programs = folder, programs
        self.port, self._etcd_port, self._peer_port = _unused_ports(3)
        self._token = secrets.token_hex(16)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._client: httpx.Client | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        try:
            self._write_secrets()
            self._start_first()
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()

    def _end_all(self) -> None:
        for name in reversed(tuple(self._processes)):  # who uses another goes first
            self._end(name, signal.SIGTERM)
        if self._client is not None:
            self._client.close()
            self._client = None

    def _start_first(self) -> None:
        """A port that was free may be somebody else's by the time that a server takes it: then on others."""
        for _ in range(_TRIES):
            self._spawn("etcd", self.programs.etcd_server, self._etcd_flags())
            try:
                return self.start()
            except AssertionError:
                if not any(_IN_USE in last_lines(self._log(name)) for name in self._processes):
                    raise
                self._end_all()
                for name in self._processes:  # the next try is judged by what it says itself
                    self._log(name).unlink()
                self.port, self._etcd_port, self._peer_port = _unused_ports(3)
        raise AssertionError(f"somebody else took the ports of the API server {_TRIES} times")

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        """Start the server, after `stop` or `kill` with the same port, identity and objects. Returns when it is ready.

        Call `spawn` and `ready` instead where a loop must go on meanwhile.
        """
        self.spawn()
        self._wait_until_ready()

    def spawn(self) -> None:
        """Start it without waiting. To be called from the main thread, whose end takes the server with it."""
        self._spawn("apiserver", self.programs.apiserver, self._apiserver_flags())

    async def ready(self) -> None:
        await asyncio.to_thread(self._wait_until_ready)

    def stop(self) -> None:
        """As in an orderly shutdown: watches end first."""
        self._end("apiserver", signal.SIGTERM)

    def kill(self) -> None:
        self._end("apiserver", signal.SIGKILL)

    def hang(self) -> None:
        """It accepts connections and answers nothing, until `resume`."""
        self._processes["apiserver"].send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._processes["apiserver"].send_signal(signal.SIGCONT)

    def is_ready(self) -> bool:
        """Raises AssertionError when a program of it does not run."""
        for name in ("etcd", "apiserver"):
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                raise AssertionError(f"{name} is not running; {self._log(name)} ends:\n{last_lines(self._log(name))}")
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()  # its certificate is whole from then on
            return self._http().get("/readyz", timeout=1.0).is_success
        except (httpx.TransportError, OSError):
            return False

    def run_controllers(self) -> None:
        """Garbage collection, deletion of namespaces and default ServiceAccounts, from now on. Install CRDs before."""
        if "controllers" not in self._processes:
            flags = [f"--kubeconfig={self.kubeconfig()}", f"--controllers={_CONTROLLERS}", "--leader-elect=false", "--secure-port=0"]
            self._spawn("controllers", self.programs.controller_manager, [*flags, "--kube-api-qps=100", "--kube-api-burst=100"])

    # ------------------------------------------------------------ use

    def call(self, method: str, path: str, body: Any = None, *, content_type: str = "application/json") -> dict[str, Any]:
        """As admin, once more where the server asks to come back. Raises httpx.HTTPStatusError."""
        data = None if body is None else json.dumps(body).encode()

        def answered() -> httpx.Response | None:
            answer = self._http().request(method, path, content=data, headers={"content-type": content_type})
            return None if answer.status_code == httpx.codes.TOO_MANY_REQUESTS else answer

        answer = wait_for(answered, f"the API server answers {method} {path}", limit=READY_LIMIT)
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def kubectl(self, *arguments: str, stdin: str = "", kubeconfig: Path | None = None) -> str:
        """Its output. Raises CalledProcessError, whose notes have what it said."""
        program = [str(self.programs.kubectl)]
        return run_kubectl(program, *arguments, kubeconfig=kubeconfig or self.kubeconfig(), home=self.folder, stdin=stdin)

    def install_crds(self) -> None:
        """The CRDs of this tree, served when it returns."""
        self.kubectl("apply", "--server-side", "--filename", str(CRDS))
        wait_for(self._has_established_crds, "all CRDs are established", limit=READY_LIMIT)
        for kind in _KINDS:  # established comes before the storage, which is made when it is first asked for
            self.call("GET", f"{_API}/{kind}")

    def clear(self) -> None:
        """Delete all objects of our kinds."""
        for kind in _KINDS:
            for found in self.call("GET", f"{_API}/{kind}")["items"]:
                self.delete(f"{_API}/namespaces/{found['metadata']['namespace']}/{kind}/{found['metadata']['name']}")

    def delete(self, path: str) -> None:
        """An object that is gone already, with its owner for instance, is no error."""
        try:
            self.call("DELETE", path)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise

    def create_namespace(self, prefix: str = "test") -> str:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": f"{prefix}-"}}
        name: str = self.call("POST", "/api/v1/namespaces", body)["metadata"]["name"]
        return name

    def kubeconfig(self, *, server: str | None = None, namespace: str | None = None) -> Path:
        """A file with which a client is the admin. `server`: another address than the server's own, such as a proxy's."""
        return self._write_kubeconfig("admin", self._token, server, namespace)

    def kubeconfig_for(self, account: NamespacedName, rules: Sequence[Mapping[str, Sequence[str]]] = ()) -> Path:
        """A file with which a client is that ServiceAccount, made here, with exactly these rules in all namespaces."""
        name = f"{account.namespace}-{account.name}"
        self._put(f"/api/v1/namespaces/{account.namespace}/serviceaccounts/{account.name}", "v1", "ServiceAccount", {})
        rbac, api = "/apis/rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io/v1"
        self._put(f"{rbac}/clusterroles/{name}", api, "ClusterRole", {"rules": list(rules)})
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
        subjects = [{"kind": "ServiceAccount", "namespace": account.namespace, "name": account.name}]
        self._put(f"{rbac}/clusterrolebindings/{name}", api, "ClusterRoleBinding", {"roleRef": role, "subjects": subjects})
        return self.kubeconfig_of(account)

    def kubeconfig_of(self, account: NamespacedName, *, pod: str | None = None) -> Path:
        """A file with which a client is that ServiceAccount, as it is. `pod`: as that pod of its namespace, on the pod's node."""
        spec: dict[str, Any] = {"expirationSeconds": 3600}
        if pod is not None:
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": pod}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = self.call("POST", f"/api/v1/namespaces/{account.namespace}/serviceaccounts/{account.name}/token", request)
        name = "-".join(filter(None, (account.namespace, account.name, pod)))
        return self._write_kubeconfig(name, answer["status"]["token"])

    # ------------------------------------------------------------ inside

    def _wait_until_ready(self) -> None:
        wait_for(self.is_ready, f"the API server is ready; see {self._log('apiserver')}", limit=READY_LIMIT)

    def _has_established_crds(self) -> bool:
        # `kubectl wait` fails on a CRD that has no conditions yet.
        crds = self.call("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions")["items"]
        conditions = [crd.get("status", {}).get("conditions") or () for crd in crds]
        return all(any(c["type"] == "Established" and c["status"] == "True" for c in of_crd) for of_crd in conditions)

    def _put(self, path: str, api_version: str, kind: str, content: dict[str, Any]) -> None:
        body = {"apiVersion": api_version, "kind": kind, "metadata": {"name": path.rpartition("/")[2]}, **content}
        self.call("PATCH", f"{path}?fieldManager=tests&force=true", body, content_type="application/apply-patch+yaml")

    def _http(self) -> httpx.Client:
        if self._client is None:
            trust = ssl.create_default_context(cafile=self._certificate)
            headers = {"authorization": f"Bearer {self._token}"}
            self._client = httpx.Client(base_url=self.url, verify=trust, headers=headers, timeout=CALL_LIMIT, trust_env=False)
        return self._client

    @property
    def _certificate(self) -> Path:
        return self.folder / "pki/apiserver.crt"

    def _write_secrets(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / "tokens.csv").write_text(f'{self._token},admin,admin,"system:masters"\n')
        command = ["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", str(self._key)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_LIMIT)

    @property
    def _key(self) -> Path:
        return self.folder / "service-accounts.pem"

    def _etcd_flags(self) -> list[str]:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        return [
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _apiserver_flags(self) -> list[str]:
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder}/pki",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._key}",
            f"--service-account-signing-key-file={self._key}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            "--profiling=false",
        ]

    def _spawn(self, name: str, program: Path, flags: list[str]) -> None:
        running = self._processes.get(name)
        assert running is None or running.poll() is not None, f"{name} runs already"
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), OUTLIVES_TESTS: "1"}
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                tied([str(program), *flags]), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _end(self, name: str, signum: signal.Signals) -> None:
        process = self._processes[name]
        process.send_signal(signal.SIGCONT)
        process.send_signal(signum)
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_LIMIT)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _write_kubeconfig(self, name: str, token: str, server: str | None = None, namespace: str | None = None) -> Path:
        path = self.folder / ("-".join(filter(None, (name, server and server.rpartition(":")[2], namespace))) + ".kubeconfig")
        url = server or self.url
        return write_kubeconfig(path, server=url, certificate=self._certificate, user=name, token=token, namespace=namespace)


def _unused_ports(n: int) -> list[int]:
    """Different ones."""
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            sock = held.enter_context(socket.socket())
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == n:
                return ports
    raise AssertionError(f"no free ports in {_PORTS}")
