"""Images of one static program each, as archives that `ctr image import` takes. Made here, so that no registry is asked."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

PAUSE: Final = "localhost/pause:1"  # holds the namespaces of each pod
HELLO: Final = "localhost/hello:1"  # the cluster's own tests run it; see e2e/cluster/images/hello
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_TYPE: Final = "application/vnd.oci.image"


def write_archive(path: Path, *, name: str, program: Path) -> None:
    """An image with nothing but that program, which it runs, as nobody."""
    layer = _tar({program.name: program.read_bytes()}, mode=0o755)
    settings = {"Entrypoint": [f"/{program.name}"], "User": "65534:65534"}
    rootfs = {"type": "layers", "diff_ids": [_digest(layer)]}
    config = _json({"architecture": _ARCHITECTURES[platform.machine()], "os": "linux", "config": settings, "rootfs": rootfs})
    parts = {"config": _reference(config, f"{_TYPE}.config.v1+json"), "layers": [_reference(layer, f"{_TYPE}.layer.v1.tar")]}
    manifest = _json({"schemaVersion": 2, "mediaType": f"{_TYPE}.manifest.v1+json", **parts})
    write_image(path, name=name, manifest=manifest, blobs=[config, layer])


def write_image(path: Path, *, name: str, manifest: bytes, blobs: Sequence[bytes]) -> None:
    """An archive of that image, with these of the blobs that its manifest names."""
    named = _reference(manifest, f"{_TYPE}.manifest.v1+json") | {"annotations": {"io.containerd.image.name": name}}
    files = {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in (*blobs, manifest)}
    files |= {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": _json({"schemaVersion": 2, "manifests": [named]})}
    path.write_bytes(_tar(files, mode=0o644))


def _tar(files: dict[str, bytes], *, mode: int) -> bytes:
    """The same for the same files."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def _reference(blob: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
