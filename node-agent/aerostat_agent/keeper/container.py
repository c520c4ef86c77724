"""What the keeper's container may use of the node's memory, as the kernel sees it, whatever settings say."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from aerostat_agent.policy.memory import ContainerMemory
from aerostat_core.ids import Bytes

# A container sees its own control group at the top.
CGROUP_V2: Final = "sys/fs/cgroup/memory.max"
CGROUP_V1: Final = "sys/fs/cgroup/memory/memory.limit_in_bytes"
_SHARED: Final = "dev/shm"


def memory_of_container(root: Path = Path("/")) -> ContainerMemory:
    """`root`: of the file system that is looked at. Without a limit: the machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _limit(root)
    if limit is None or limit >= machine:
        return ContainerMemory(limit=machine, shared=0)
    shared = 0
    with suppress(OSError):
        found = os.statvfs(root / _SHARED)
        shared = found.f_blocks * found.f_frsize
    return ContainerMemory(limit=limit, shared=min(shared, limit))


def _limit(root: Path) -> Bytes | None:
    for path in (CGROUP_V2, CGROUP_V1):
        with suppress(OSError, ValueError):  # not that version; or "max"
            return int((root / path).read_text())
    return None
