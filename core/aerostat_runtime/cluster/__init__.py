"""The declared state of the cluster behind one port, and its adapters."""

from pathlib import Path

from aerostat_core.errors import SettingError
from aerostat_runtime.cluster.port import Adapter


def open_cluster(url: str, *, manager: str = "aerostat") -> Adapter:
    """The adapter that a process is told to use: `folder:STATE`, the state folder of `aerostat up`, or `kubernetes:`.

    `manager`: the component, as the owner of what it applies and the source of its events. Raises SettingError.
    """
    scheme, _, rest = url.partition(":")
    # An adapter brings its own dependencies, which a process that uses another one need not have.
    if scheme == "folder" and rest:
        from aerostat_runtime.cluster.folder import FolderCluster

        return FolderCluster(Path(rest))
    if scheme == "kubernetes":
        from aerostat_runtime.cluster.kubernetes import KubernetesCluster
        from aerostat_runtime.cluster.kubernetes_connection import Target

        return KubernetesCluster(Target.parse(rest), manager=manager)
    raise SettingError(f"--cluster takes folder:PATH (the state folder of `aerostat up`) or kubernetes: (an API server), got {url!r}")
