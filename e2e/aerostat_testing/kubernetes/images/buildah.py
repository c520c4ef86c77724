"""Debian's buildah, with a storage folder of our own.

It runs in namespaces of its own, so that no mount and no process stays of a build that was killed.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.caches import BuildError, Say, run_patiently
from aerostat_testing.tied import tied

QUERY_LIMIT: Final[Seconds] = 300.0
_SHOWN_OF_A_STEP: Final = 100  # characters


def in_own_namespaces(*command: str) -> list[str]:
    """That command, whose mounts and processes end with it, and it with this process. Raises BuildError where it is missing."""
    options = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return tied([required("unshare"), *options, required(command[0]), *command[1:]])


def required(program: str) -> str:
    """Where it is. Raises BuildError."""
    if (found := shutil.which(program)) is None:
        raise BuildError(f"images need {program}: run `make cluster-tools` as root (Debian), or install it")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """`folder` has its files as they are, and what it removes of the layers below as overlayfs says that."""

    digest: str  # of its uncompressed archive
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The lowest layer comes first."""

    name: str
    manifest: str
    config: str
    layers: tuple[Layer, ...]

    @property
    def n_bytes(self) -> int:
        """Of its uncompressed layers."""
        return sum(layer["size"] for layer in json.loads(self.manifest)["layers"])


class Buildah:
    """One process uses a folder at a time: the caller sees to it."""

    def __init__(self, folder: Path, *, say: Say) -> None:
        self._storage, self._scratch, self._say = folder / "storage", folder / "scratch", say
        self._scratch.mkdir(parents=True, exist_ok=True)

    def build(
        self,
        name: str,
        dockerfile: Path,
        context: Path,
        *,
        arguments: Mapping[str, str] | None = None,
        mounts: Iterable[str] = (),
        target: str = "",
        stages: Mapping[str, str] | None = None,
    ) -> None:
        """`mounts`: `SOURCE:PLACE[:ro]`, there while it builds. `stages`: images that are such a stage already.

        Steps that were built before are taken as they are. Raises BuildError.
        """
        command = ["bud", "--isolation=chroot", "--layers", f"--tag={name}", f"--file={dockerfile}"]
        command += [f"--build-arg={key}={value}" for key, value in (arguments or {}).items()]
        command += [f"--volume={mount}" for mount in mounts]
        command += [f"--build-context={stage}=container-image://{image}" for stage, image in (stages or {}).items()]
        command += [f"--target={target}"] if target else []
        with self._command(*command, str(context)) as run:
            run_patiently(run, name, progress=_last_step, say=self._say, environment=self._environment)

    def image(self, name: str) -> Image:
        """One that is there."""
        found = json.loads(self._ask("inspect", "--type=image", name))
        layers = {layer["diff-digest"]: layer["id"] for layer in json.loads((self._storage / "overlay-layers/layers.json").read_text())}
        digests = json.loads(found["Config"])["rootfs"]["diff_ids"]
        return Image(
            name=name,
            manifest=found["Manifest"],
            config=found["Config"],
            layers=tuple(Layer(digest=digest, folder=self._storage / "overlay" / layers[digest] / "diff") for digest in digests),
        )

    def names(self) -> set[str]:
        """Of all images that have one."""
        found: list[dict[str, Any]] = json.loads(self._ask("images", "--json"))
        return {name for image in found for name in image.get("names") or ()}

    def keep(self, names: Iterable[str]) -> None:
        """Remove the other images, and the steps that no image of these names was built by."""
        if old := sorted(self.names() - set(names)):
            self._ask("rmi", *old)
        self._ask("rmi", "--prune")

    def remove_unfinished(self) -> None:
        """Of builds that were killed."""
        self._ask("rm", "--all")

    def _ask(self, *arguments: str) -> str:
        with self._command(*arguments) as run:
            done = subprocess.run(run, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=QUERY_LIMIT)
        if done.returncode:
            raise BuildError(f"buildah {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    @contextmanager
    def _command(self, *arguments: str) -> Iterator[list[str]]:
        """It writes down what it mounted, which is so in its own namespace only: each command has its own book."""
        with tempfile.TemporaryDirectory(prefix="run-", dir=self._scratch) as run:
            yield in_own_namespaces("buildah", f"--root={self._storage}", f"--runroot={run}", "--storage-driver=overlay", *arguments)

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | {"TMPDIR": str(self._scratch)}


def _last_step(said: str) -> str:
    steps = [line for line in said.splitlines() if "STEP" in line]
    return steps[-1][:_SHOWN_OF_A_STEP] if steps else "begins"
