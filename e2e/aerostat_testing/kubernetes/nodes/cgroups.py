"""The cluster's own cgroup (version 1) in every hierarchy, below the caller's: what pods use is limited and counted there.

Its name tells which process keeps it, so that a cgroup of a dead keeper is known as such.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.nodes.processes import Process

REMOVAL_LIMIT: Final[Seconds] = 20.0
PREFIX: Final = "aerostat-cluster-"
_POLL: Final[Seconds] = 0.05
_NOT_CONTROLLERS: Final = ("rw", "ro", "xattr", "clone_children")  # among the options of a mount
_INHERITED: Final = ("cpuset.cpus", "cpuset.mems")  # empty in a new cgroup, and then no process may enter


class CgroupError(Exception):
    """The message says what this machine lacks, or what is in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    """A hierarchy, and which of its cgroups is seen at the mount point."""

    hierarchy: str  # as /proc/PID/cgroup names it, such as "memory" or "name=systemd"
    root: str
    path: Path


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The folders of one cgroup, one in each hierarchy."""

    folders: tuple[Path, ...]

    @classmethod
    def of(cls, pid: int) -> Self:
        """That process is in. Raises CgroupError where there are no hierarchies of version 1."""
        places = dict(_places(pid))
        folders = tuple(m.path / os.path.relpath(places[m.hierarchy], m.root) for m in _mounts() if m.hierarchy in places)
        if not any((folder / "cpuset.cpus").exists() for folder in folders):
            raise CgroupError("nodes need cgroup version 1 (cpu, cpuset, memory, ... under /sys/fs/cgroup); version 2 is not supported yet")
        return cls(folders)

    @property
    def name(self) -> str:
        return self.folders[0].name

    def child(self, name: str) -> "Cgroup":
        return Cgroup(tuple(folder / name for folder in self.folders))

    def create(self) -> None:
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
            for name in _INHERITED:
                if (folder / name).exists():
                    (folder / name).write_text((folder.parent / name).read_text())

    def enter(self) -> None:
        """With this process, and all that it starts from now on."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text("0")

    def remove(self) -> None:
        """With all below. Processes in it are to be dead already, but may still be ending. Raises CgroupError."""
        deadline = time.monotonic() + REMOVAL_LIMIT
        while left := [path for path in self.folders if not _is_removed(path)]:
            if time.monotonic() >= deadline:
                raise CgroupError(f"still in use after {REMOVAL_LIMIT:g} s: {', '.join(map(str, left))}")
            time.sleep(_POLL)


def name_for(keeper: Process) -> str:
    return f"{PREFIX}{keeper}"


def abandoned() -> list[Cgroup]:
    """What dead keepers left, wherever in the hierarchies."""
    found: dict[str, list[Path]] = {}
    for mount in _mounts():
        for parent, names, _ in os.walk(mount.path):
            ours = [name for name in names if name.startswith(PREFIX)]
            for name in ours:
                found.setdefault(name, []).append(Path(parent, name))
            names[:] = [name for name in names if name not in ours]
    return [Cgroup(tuple(paths)) for name, paths in found.items() if not is_kept(name)]


def is_kept(name: str) -> bool:
    keeper = Process.parse(name.removeprefix(PREFIX))
    return keeper is not None and keeper.is_alive


def _is_removed(path: Path) -> bool:
    """Whether it is gone after removing what can be: a cgroup has only folders that can be removed, and none of them while in use."""
    for folder, _, _ in os.walk(path, topdown=False):
        try:
            Path(folder).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return not path.exists()


def _places(pid: int) -> Iterator[tuple[str, str]]:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, hierarchy, place = line.split(":", 2)
        yield hierarchy, place


def _mounts() -> list[_Mount]:
    return [mount for line in Path("/proc/self/mountinfo").read_text().splitlines() if (mount := _mount(line))]


def _mount(line: str) -> _Mount | None:
    before, _, after = line.partition(" - ")
    kind, _, options = after.split(" ", 2)
    if kind != "cgroup":
        return None
    _, _, _, root, path, *_ = before.split(" ")
    hierarchy = ",".join(word for word in options.split(",") if word not in _NOT_CONTROLLERS and "_agent=" not in word)
    return _Mount(hierarchy=hierarchy, root=root, path=Path(path))
