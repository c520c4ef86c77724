"""The declared state of the cluster behind one port, and its adapters."""

from pathlib import Path

from aerostat_core.errors import SettingError
from aerostat_runtime.cluster.port import Cluster


def open_cluster(url: str) -> Cluster:
    """The adapter that a process is told to use: `folder:STATE`, the state folder of `aerostat up`.

    Raises SettingError for anything else.
    """
    scheme, _, rest = url.partition(":")
    if scheme != "folder" or not rest:
        raise SettingError(f"--cluster takes folder:PATH (the state folder of `aerostat up`), got {url!r}")
    # An adapter brings its own dependencies, which a process that uses another one need not have.
    from aerostat_runtime.cluster.folder import FolderCluster

    return FolderCluster(Path(rest))
