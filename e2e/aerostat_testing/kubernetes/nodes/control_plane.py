"""The control plane's secrets, and the programs that it runs: etcd, API server, controller manager, scheduler and DNS."""

import secrets
import subprocess
from pathlib import Path
from typing import Any, Final

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.build import NodePrograms
from aerostat_testing.kubernetes.client import write_kubeconfig
from aerostat_testing.kubernetes.nodes import network
from aerostat_testing.kubernetes.nodes.init import Program
from aerostat_testing.kubernetes.nodes.keeper import DISK

# Tests wait for these: a node that is silent is NotReady, and then its pods are given up.
SILENT_FOR: Final[Seconds] = 12.0
TOLERATED_FOR: Final[Seconds] = 5.0
PORT: Final = 6443
ADMIN: Final = "admin"
DOMAIN: Final = "cluster.local"
DNS_USER: Final = "system:coredns"
_PROGRAMS: Final = ("system:kube-controller-manager", "system:kube-scheduler", "system:kube-proxy", DNS_USER)
_LIMIT: Final[Seconds] = 20.0
_ISSUER: Final = "https://kubernetes.default.svc"
_GROUPS: Final = {ADMIN: "system:masters"}
_ETCD: Final = "http://127.0.0.1:2379"
_ETCD_PEER: Final = "http://127.0.0.1:2380"


class ControlPlane:
    """Its folder has all that is secret. Clients are told apart by tokens, and have what Kubernetes' own roles give them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_secrets(self, users: dict[str, str]) -> None:
        """`users`: their groups. The admin and the programs of this machine are there anyway."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = _GROUPS | dict.fromkeys(_PROGRAMS, "") | users
        lines = [f'{secrets.token_hex(16)},{user},{user},"{groups}"\n' for user, groups in known.items()]
        self._tokens.write_text("".join(lines))
        key = ["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", str(self._accounts_key)]
        # What the API server shows to kubelets: they trust this one certificate, which signs itself.
        certificate = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "365"]
        certificate += ["-subj", "/O=system:masters/CN=kube-apiserver", "-addext", "extendedKeyUsage=clientAuth"]
        for command in (key, [*certificate, "-keyout", str(self._client_key), "-out", str(self.client_certificate)]):
            subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT)

    def kubeconfig(self, user: str, path: Path, *, certificate: Path | str | None = None) -> Path:
        """A file with which a client is that user. `certificate`: where it sees the API server's, if elsewhere than here."""
        tokens = dict(line.split(",")[1::-1] for line in self._tokens.read_text().splitlines())
        server = f"https://{network.CONTROL_PLANE}:{PORT}"
        return write_kubeconfig(path, server=server, certificate=certificate or self.certificate, user=user, token=tokens[user])

    @property
    def certificate(self) -> Path:
        """The API server makes it when it first starts."""
        return self.folder / "serving/apiserver.crt"

    @property
    def client_certificate(self) -> Path:
        return self.folder / "kubelet-client.crt"

    def programs(self, found: NodePrograms) -> tuple[Program, ...]:
        """Controllers and scheduler wait for the API server's certificate, DNS for `start_dns`."""
        users = ("system:kube-controller-manager", "system:kube-scheduler")
        manager, scheduling = (self.kubeconfig(user, self.folder / f"{user.partition(':')[2]}.kubeconfig") for user in users)
        plane, ready = found.control_plane, str(self.certificate)
        return (
            Program(name="etcd", argv=(str(plane.etcd_server), *self._etcd_flags())),
            Program(name="kube-apiserver", argv=(str(plane.apiserver), *self._apiserver_flags())),
            Program(name="kube-controller-manager", argv=(str(plane.controller_manager), *self._manager_flags(manager)), needs=ready),
            Program(name="kube-scheduler", argv=(str(found.kubernetes / "kube-scheduler"), *_scheduler_flags(scheduling)), needs=ready),
            Program(name="coredns", argv=(str(found.coredns / "coredns"), f"-conf={self._corefile}"), needs=str(self._corefile)),
        )

    def dns_rights(self) -> list[dict[str, Any]]:
        """Objects for the API server: Kubernetes has no role for this."""
        group = "rbac.authorization.k8s.io"
        core = {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]}
        slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        named = {"apiVersion": f"{group}/v1", "metadata": {"name": DNS_USER}}
        reference = {"apiGroup": group, "kind": "ClusterRole", "name": DNS_USER}
        subjects = [{"apiGroup": group, "kind": "User", "name": DNS_USER}]
        return [
            named | {"kind": "ClusterRole", "rules": [core, slices]},
            named | {"kind": "ClusterRoleBinding", "roleRef": reference, "subjects": subjects},
        ]

    def start_dns(self) -> None:
        """Once it has its rights."""
        kubeconfig = self.kubeconfig(DNS_USER, self.folder / "coredns.kubeconfig")
        zones = f"{DOMAIN} in-addr.arpa"
        plugins = f"    errors\n    kubernetes {zones} {{\n        kubeconfig {kubeconfig}\n    }}\n"
        made = self._corefile.with_suffix(".new")
        made.write_text(f".:53 {{\n{plugins}}}\n")
        made.replace(self._corefile)

    @property
    def _corefile(self) -> Path:
        return self.folder / DISK / "Corefile"

    @property
    def _tokens(self) -> Path:
        return self.folder / "tokens.csv"

    @property
    def _accounts_key(self) -> Path:
        return self.folder / "service-accounts.pem"

    @property
    def _client_key(self) -> Path:
        return self.folder / "kubelet-client.key"

    def _etcd_flags(self) -> list[str]:
        return [
            f"--data-dir={self.folder / DISK}/etcd",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
            f"--listen-peer-urls={_ETCD_PEER}",
            f"--initial-advertise-peer-urls={_ETCD_PEER}",
            f"--initial-cluster=default={_ETCD_PEER}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _apiserver_flags(self) -> list[str]:
        return [
            f"--etcd-servers={_ETCD}",
            f"--bind-address={network.CONTROL_PLANE}",
            f"--advertise-address={network.CONTROL_PLANE}",
            f"--secure-port={PORT}",
            f"--cert-dir={self.certificate.parent}",
            f"--token-auth-file={self._tokens}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-account-issuer={_ISSUER}",
            f"--service-account-key-file={self._accounts_key}",
            f"--service-account-signing-key-file={self._accounts_key}",
            f"--service-cluster-ip-range={network.SERVICES}",
            f"--kubelet-client-certificate={self.client_certificate}",
            f"--kubelet-client-key={self._client_key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--default-not-ready-toleration-seconds={TOLERATED_FOR:.0f}",
            f"--default-unreachable-toleration-seconds={TOLERATED_FOR:.0f}",
            "--allow-privileged=true",
            "--profiling=false",
        ]

    def _manager_flags(self, kubeconfig: Path) -> list[str]:
        return [
            f"--kubeconfig={kubeconfig}",
            f"--service-account-private-key-file={self._accounts_key}",
            f"--root-ca-file={self.certificate}",
            f"--node-monitor-grace-period={SILENT_FOR:.0f}s",
            "--node-monitor-period=1s",
            "--use-service-account-credentials",
            "--leader-elect=false",
            "--profiling=false",
        ]


def _scheduler_flags(kubeconfig: Path) -> list[str]:
    return [f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--profiling=false"]
