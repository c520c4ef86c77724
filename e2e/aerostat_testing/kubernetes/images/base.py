"""The base image, in place of the public one: a minimal Debian (or Ubuntu) with Python, from the archive that apt is set up with."""

import hashlib
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Final

from aerostat_testing.kubernetes.caches import BuildError, Say, run_patiently
from aerostat_testing.kubernetes.images.buildah import Buildah, in_own_namespaces
from aerostat_testing.kubernetes.images.machine import apt_mirror

_PACKAGES: Final = ("ca-certificates", "python3", "python3-venv")
# As the public slim images do.
_LEFT_OUT: Final = (
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/cache/debconf",
    "var/lib/apt/lists",
    "var/log",
)
_DOCKERFILE: Final = "FROM scratch\nADD . /\n"


def base_name() -> str:
    """With all that makes a difference in its tag."""
    settings = repr((_codename(), platform.machine(), _PACKAGES, _LEFT_OUT, _DOCKERFILE))
    return f"localhost/aerostat-base:{hashlib.sha256(settings.encode()).hexdigest()[:12]}"


def ensure_base(buildah: Buildah, scratch: Path, say: Say) -> str:
    """Its name. Raises BuildError."""
    if (name := base_name()) not in buildah.names():
        codename = _codename()
        if (mirror := apt_mirror(codename)) is None:
            raise BuildError(f"apt is set up with no archive that has {codename}: the base image is made from it")
        with tempfile.TemporaryDirectory(prefix="base-", dir=scratch) as made:
            root, dockerfile = Path(made, "root"), Path(made, "Dockerfile")
            dockerfile.write_text(_DOCKERFILE)
            command = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", codename, str(root), mirror]
            run_patiently(in_own_namespaces(*command), name, progress=_last_line, say=say)
            for place in _LEFT_OUT:
                _empty(root / place)
            buildah.build(name, dockerfile, root)
    return name


def _codename() -> str:
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME")
    if not codename:
        raise BuildError("this machine is no Debian, nor made of it: images for tests need its archive")
    return codename


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _last_line(said: str) -> str:
    return said.rstrip().rpartition("\n")[2]
