"""What a machine needs so that nodes can be made on it; what is missing is said before anything is made."""

import os
import shutil
from typing import Final

from aerostat_testing.kubernetes.nodes.cgroups import Cgroup, CgroupError

# Without NET_ADMIN there is no bridge, without SYS_ADMIN no namespace.
_CAPABILITIES: Final = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_PROGRAMS: Final = ("ip", "iptables", "mount", "nsenter", "openssl", "unshare")


class MissingError(Exception):
    """The message says what to install or to allow."""


def require() -> None:
    """Raises MissingError."""
    lacking = [name for name, bit in _CAPABILITIES.items() if not _effective() >> bit & 1]
    if os.geteuid() or lacking:
        raise MissingError(f"nodes are made of namespaces: run as root{' with ' + ', '.join(lacking) if lacking else ''}")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        raise MissingError(f"nodes need {', '.join(missing)}: run `make cluster-tools` as root (Debian), or install them")
    try:
        Cgroup.of(os.getpid())
    except CgroupError as error:
        raise MissingError(str(error)) from None


def _effective() -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("CapEff:"))
    return int(line.split()[1], 16)
