"""How a node comes to its images, without a registry: archives are unpacked, images that were built here are shared.

What was built here lies unpacked in the builder's storage already. The node gets hard links to it, so that there is one copy
on the machine however many nodes there are. That is safe, since containers see layers read-only, below one of their own.
"""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.images.buildah import Image, Layer
from aerostat_testing.kubernetes.nodes import node, oci
from aerostat_testing.kubernetes.nodes.machine import Machine

IMPORT_LIMIT: Final[Seconds] = 900.0
_CTR: Final = ("/run/programs/containerd/ctr", f"--address={node.SOCKET}", "--namespace=k8s.io")
_LAYERS: Final = ".layers"  # beside an archive that has none
# As `ctr snapshots mounts` tells it: alone, or above others.
_WRITTEN_TO: Final = re.compile(r"upperdir=([^,\s]+)|bind (\S+)")


class ImageError(Exception):
    """What the container runtime said."""


def write_without_layers(image: Image, archive: Path) -> None:
    """The image as an archive, and beside it a list of where its layers are."""
    oci.write_image(archive, name=image.name, manifest=image.manifest.encode(), blobs=[image.config.encode()])
    layers = [[layer.digest, str(layer.folder)] for layer in image.layers]
    archive.with_suffix(_LAYERS).write_text(json.dumps(layers))


class NodeImages:
    """Those of one node, whose `/var` is at `disk/var` seen from here."""

    def __init__(self, machine: Machine, disk: Path) -> None:
        self._machine, self._disk = machine, disk

    def is_served(self) -> bool:
        return self._run("version").returncode == 0

    def add(self, archive: Path) -> None:
        """Raises ImageError."""
        layers = archive.with_suffix(_LAYERS)
        if layers.exists():
            self._share([Layer(digest=digest, folder=Path(folder)) for digest, folder in json.loads(layers.read_text())])
        # The layers are unpacked, so the node needs their archives no longer; the disk is all nodes'.
        self._ctr("image", "import", "--local", "--discard-unpacked-layers", "-", archive=archive)

    def _share(self, layers: Sequence[Layer]) -> None:
        has = {line.split()[0] for line in self._ctr("snapshots", "list").splitlines()}
        below = ""
        for layer in layers:
            chain = f"{below} {layer.digest}" if below else layer.digest
            name = f"sha256:{hashlib.sha256(chain.encode()).hexdigest()}" if below else chain
            if name not in has:
                self._link(layer, name, below)
            below = name

    def _link(self, layer: Layer, name: str, below: str) -> None:
        draft = f"draft-{name}"
        self._run("snapshots", "remove", draft)  # of a time when the node's power was cut
        self._ctr("snapshots", "prepare", draft, *filter(None, [below]))
        mounts = self._ctr("snapshots", "mounts", "/there", draft)
        found = _WRITTEN_TO.search(mounts)
        assert found, mounts
        place = self._disk / (found[1] or found[2]).lstrip("/")
        how = ["--link"] if os.stat(layer.folder).st_dev == os.stat(place).st_dev else []
        subprocess.run(["cp", "--archive", *how, f"{layer.folder}/.", place], check=True, capture_output=True, timeout=IMPORT_LIMIT)
        self._ctr("snapshots", "commit", name, draft)

    def _ctr(self, *arguments: str, archive: Path | None = None) -> str:
        done = self._run(*arguments, archive=archive)
        if done.returncode:
            raise ImageError(f"{self._machine.name}: {archive or ' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def _run(self, *arguments: str, archive: Path | None = None) -> subprocess.CompletedProcess[str]:
        with (archive or Path(os.devnull)).open("rb") as read:
            command = self._machine.command([*_CTR, *arguments], namespaces=["mount"])
            return subprocess.run(command, stdin=read, capture_output=True, text=True, timeout=IMPORT_LIMIT)
