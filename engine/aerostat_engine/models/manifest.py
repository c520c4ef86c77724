"""Which files a model in the cache is made of, so that one that was cut short, changed or copied badly is noticed before it serves.

Written when a model is whole. Sizes and times are compared at each preparation, contents only where times differ: a cache that was
copied to this machine is read once. For mistakes and broken disks, not against people who can write the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from aerostat_core.ids import Bytes
from aerostat_runtime.model_cache import write_whole

Progress = Callable[[Bytes, Bytes], None]
"""Called with what is done and the total, in bytes."""
NAME: Final = "aerostat-manifest.json"
_READ_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    n_bytes: Bytes
    mtime_ns: int
    sha256: str


def write_manifest(folder: Path, progress: Progress) -> None:
    """Of all that lies in `folder`, which is read for it."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != NAME)
    hashes = _hashes(paths, progress)
    stats = {path: path.stat() for path in paths}
    _write(folder, {p.name: File(n_bytes=stats[p].st_size, mtime_ns=stats[p].st_mtime_ns, sha256=hashes[p]) for p in paths})


def fault(folder: Path, progress: Progress) -> str | None:
    """What is wrong with a model of the cache, or None; contents are read, with `progress`, only where times differ."""
    try:
        files = {name: File(**file) for name, file in json.loads((folder / NAME).read_text())["files"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return f"it has no {NAME} that can be read"
    doubted = {}
    for name, file in files.items():
        try:
            stat = (folder / name).stat()
        except FileNotFoundError:
            return f"{name} is missing"
        if stat.st_size != file.n_bytes:
            return f"{name} has {stat.st_size} bytes instead of {file.n_bytes}"
        if stat.st_mtime_ns != file.mtime_ns:
            doubted[name] = file
    for path, sha256 in _hashes([folder / name for name in doubted], progress).items():
        if sha256 != files[path.name].sha256:
            return f"{path.name} was changed"
    if doubted:
        _write(folder, files | {name: replace(file, mtime_ns=(folder / name).stat().st_mtime_ns) for name, file in doubted.items()})
    return None


def content_id(folder: Path) -> str:
    """The same wherever the model was copied to. Only for a folder that has no `fault`."""
    files = json.loads((folder / NAME).read_text())["files"]
    return hashlib.sha256(json.dumps([(name, files[name]["sha256"]) for name in sorted(files)]).encode()).hexdigest()


def sha256_of(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            progress(file.tell(), size)
    return digest.hexdigest()


def _hashes(paths: Sequence[Path], progress: Progress) -> dict[Path, str]:
    """With the progress of all."""
    total, before = sum(path.stat().st_size for path in paths), 0
    hashes = {}

    def add(done: Bytes, _: Bytes) -> None:
        progress(before + done, total)

    for path in paths:
        hashes[path] = sha256_of(path, add)
        before += path.stat().st_size
    return hashes


def _write(folder: Path, files: dict[str, File]) -> None:
    write_whole(folder / NAME, json.dumps({"files": {name: asdict(file) for name, file in files.items()}}, indent=1))
