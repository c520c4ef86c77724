"""What a machine sees as its disk: the host's files read-only, with `/var`, `/tmp`, `/run` and `/dev/shm` of its own.

Called by the machine's first process, in its own mount namespace. What is written elsewhere fails, so that nothing of a
node or of its pods reaches the host, nor another node.
"""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_READ_ONLY: Final = 1
_REMOUNT: Final = 32
_BIND: Final = 4096
_RECURSIVE: Final = 16384
_SHARED: Final = 1 << 20
_DETACH: Final = 2
_CGROUPS: Final = Path("/sys/fs/cgroup")
# kubelet sets them as it likes, and they are the whole kernel's: it gets copies.
_TUNABLES: Final = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)

_libc: Final = ctypes.CDLL(None, use_errno=True)


def separate(disk: Path, *, shown: Mapping[str, Path]) -> None:
    """`disk`: the machine's `var` and `tmp`, which stay. `shown`: folders of the host by where they are seen, under `/run` or `/var`."""
    held = {place: os.open(path, os.O_PATH) for place, path in {"/var": disk / "var", "/tmp": disk / "tmp", **shown}.items()}
    _mount("tmpfs", "/run", kind="tmpfs", options="mode=755")
    _mount("tmpfs", "/dev/shm", kind="tmpfs", options="mode=1777")
    for place, fd in held.items():  # by descriptor, since one mount may hide where the next one comes from
        Path(place).mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", place, flags=_BIND)
        os.close(fd)
    _mount_own_cgroups()
    _copy_tunables(Path("/run/tunables"))
    _mount(None, "/", flags=_REMOUNT | _BIND | _READ_ONLY)
    _mount(None, "/", flags=_SHARED | _RECURSIVE)  # mounts of volumes reach containers


def _mount_own_cgroups() -> None:
    """The same hierarchies, whose top is this machine's cgroup."""
    hierarchies = [line.split(":", 2)[1] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for path in _CGROUPS.iterdir():
        if path.is_mount():
            _checked(_libc.umount2(str(path).encode(), _DETACH), f"unmount {path}")
    _mount("cgroups", str(_CGROUPS), kind="tmpfs", options="mode=755")
    for hierarchy in filter(None, hierarchies):
        folder = _CGROUPS / hierarchy.removeprefix("name=")
        folder.mkdir()
        _mount("cgroup", str(folder), kind="cgroup", options=f"none,{hierarchy}" if hierarchy.startswith("name=") else hierarchy)


def _copy_tunables(folder: Path) -> None:
    folder.mkdir()
    for name in _TUNABLES:
        original, copy = Path("/proc/sys", name), folder / name.replace("/", ".")
        copy.write_text(original.read_text())
        _mount(str(copy), str(original), flags=_BIND)


def _mount(source: str | None, target: str, *, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    words = (None if word is None else word.encode() for word in (source, target, kind, options))
    where, onto, what, how = words
    _checked(_libc.mount(where, onto, what, ctypes.c_ulong(flags), how), f"mount {source} at {target}")


def _checked(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
