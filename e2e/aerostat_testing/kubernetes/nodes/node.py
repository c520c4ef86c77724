"""What a node finds on its disk, and the programs that it runs: containerd, kubelet and kube-proxy."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import yaml

from aerostat_testing.kubernetes.build import NodePrograms
from aerostat_testing.kubernetes.nodes import network
from aerostat_testing.kubernetes.nodes.control_plane import DOMAIN, SILENT_FOR, ControlPlane
from aerostat_testing.kubernetes.nodes.init import Boot, Program
from aerostat_testing.kubernetes.nodes.keeper import DISK, LOGS
from aerostat_testing.kubernetes.nodes.oci import PAUSE

SOCKET: Final = "/run/containerd/containerd.sock"
# Made when a node has the images that the others have: until then kubelet would look for them in a registry.
IMAGES_ARE_THERE: Final = "/run/images-are-there"
PROXY_USER: Final = "system:kube-proxy"
_SETTINGS: Final = "/var/lib/node"
_SHOWN: Final = "/run/programs"
_HOST_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def user(name: str) -> str:
    return f"system:node:{name}"


def prepare(folder: Path, number: int, plane: ControlPlane) -> None:
    """Write the settings into the node's disk; what else is there stays."""
    disk = folder / DISK
    for path in (disk / "var/log", disk / "var/lib/kubelet", disk / "var/tmp", disk / "tmp", folder / LOGS):
        path.mkdir(parents=True, exist_ok=True)
    for name in ("run", "lock"):
        if not (link := disk / "var" / name).is_symlink():
            link.symlink_to("/run" if name == "run" else "/run/lock")
    settings = disk / _SETTINGS.lstrip("/")
    (settings / "cni").mkdir(parents=True, exist_ok=True)
    for source in (plane.certificate, plane.client_certificate):
        shutil.copy(source, settings)
    for who, file in ((user(folder.name), "kubelet.kubeconfig"), (PROXY_USER, "kube-proxy.kubeconfig")):
        plane.kubeconfig(who, settings / file, certificate=f"{_SETTINGS}/{plane.certificate.name}")
    (settings / "kubelet.yaml").write_text(yaml.safe_dump(_kubelet()))
    (settings / "kube-proxy.yaml").write_text(yaml.safe_dump(_kube_proxy()))
    (settings / "containerd.toml").write_text(_CONTAINERD)
    (settings / "cni/10-pods.conflist").write_text(json.dumps(_pod_network(number)))


def boot(folder: Path, number: int, found: NodePrograms) -> Boot:
    programs = {f"{_SHOWN}/{path.parent.name}": str(path) for path in found.folders}
    kubelet = (
        f"{_SHOWN}/kubernetes-node/kubelet",
        f"--config={_SETTINGS}/kubelet.yaml",
        f"--kubeconfig={_SETTINGS}/kubelet.kubeconfig",
        f"--hostname-override={folder.name}",
        f"--node-ip={network.address(number)}",
        "--runtime-cgroups=/",
    )
    proxy = (f"{_SHOWN}/kubernetes-node/kube-proxy", f"--config={_SETTINGS}/kube-proxy.yaml", f"--hostname-override={folder.name}")
    return Boot(
        hostname=folder.name,
        programs=(
            Program(name="containerd", argv=(f"{_SHOWN}/containerd/containerd", f"--config={_SETTINGS}/containerd.toml")),
            Program(name="kubelet", argv=kubelet, needs=IMAGES_ARE_THERE),
            Program(name="kube-proxy", argv=proxy),
        ),
        path=":".join([*programs, _HOST_PATH]),
        logs="/var/log",
        held=f"{_SETTINGS}/held",
        disk=str(folder / DISK),
        shown={"/var/log": str(folder / LOGS), **programs},
    )


def _kubelet() -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": ["pods"],
        "authentication": {"x509": {"clientCAFile": f"{_SETTINGS}/kubelet-client.crt"}, "anonymous": {"enabled": False}},
        # A lease is renewed each quarter of its duration: six times, and three statuses, before a busy node counts as silent.
        "nodeStatusUpdateFrequency": f"{SILENT_FOR / 3:.0f}s",
        "nodeLeaseDurationSeconds": round(SILENT_FOR * 2 / 3),
        "resolvConf": "",
        "clusterDNS": [network.CONTROL_PLANE],
        "clusterDomain": DOMAIN,
        # Images come from no registry: what is removed for space would never come back. All nodes share one real disk.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        # Without CAP_SYS_RESOURCE these are what it may have.
        "maxOpenFiles": 20000,
        "oomScoreAdj": 0,
    }


def _kube_proxy() -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": f"{_SETTINGS}/kube-proxy.kubeconfig"},
        "clusterCIDR": network.PODS,
        # The kernel's, of which nodes have no own.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _pod_network(number: int) -> dict[str, Any]:
    # What is given out is forgotten with the node's power, as the pods are.
    addresses = {"ranges": [[{"subnet": network.pods_of(number)}]], "routes": [{"dst": "0.0.0.0/0"}]}
    ipam = {"type": "host-local", "dataDir": "/run/cni", **addresses}
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [{"type": "ptp", "ipam": ipam}, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


_CONTAINERD: Final = f"""\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
address = "{SOCKET}"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
disable_apparmor = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{_SHOWN}/cni"]
conf_dir = "{_SETTINGS}/cni"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{_SHOWN}/runc/runc"
SystemdCgroup = false
"""
