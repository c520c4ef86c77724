"""Builds the images of all components from `images/*/Dockerfile`, once, into the cache.

`make images` does so ahead of the tests; a fixture that misses them builds them as well. What nothing changed in is known by
a key and takes no time; a change of our own sources makes one small layer anew. The latest images are kept, and those before
them: two trees that are worked on in turns do not build in turns.
"""

import hashlib
import json
import os
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.caches import BuildError, Say, alone, default_cache, say_on_stderr
from aerostat_testing.kubernetes.images.base import base_name, ensure_base
from aerostat_testing.kubernetes.images.buildah import Buildah, Image, Layer, required
from aerostat_testing.kubernetes.images.machine import installer_mounts

ROOT: Final = Path(__file__).resolve().parents[4]
REGISTRY: Final = "localhost"  # the chart's `image.registry` for these
REPOSITORIES: Final = {  # as in the chart's values
    "operator": "aerostat/operator",
    "router": "aerostat/router",
    "agent": "aerostat/agent",
    "engines": "aerostat/engines-cpu",
}
_PROGRAMS: Final = ("apt-get", "buildah", "debootstrap", "unshare")
_KEPT: Final = 2
_GIT_LIMIT: Final[Seconds] = 30.0


def images(*, cache: Path | None = None, say: Say | None = None) -> dict[str, Image]:
    """By component, built where they are not there yet: some minutes with nothing cached. Raises BuildError."""
    folder, say, key = (cache or default_cache()) / "component-images", say or say_on_stderr, _key()
    record = folder / f"{key}.json"
    if (found := _recorded(record)) is None:
        _require()
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder, "images", say):
            if (found := _recorded(record)) is None:  # another process may have built them meanwhile
                found = _build(folder, key, say)
                _record(record, found)
    record.touch()  # used last
    return found


def version() -> str:
    project: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return project


def context_files() -> list[Path]:
    """What builds see of the tree."""
    shown = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return sorted({path for pattern in shown for path in _files(pattern) if "__pycache__" not in path.parts})


def _files(pattern: str) -> Iterator[Path]:
    for path in ROOT.glob(pattern):
        yield from (found for found in ([path] if path.is_file() else path.rglob("*")) if found.is_file())


def _key() -> str:
    """Of all that makes a difference to what is built."""
    made = hashlib.sha256(base_name().encode())
    for path in [ROOT / ".dockerignore", *(ROOT / "images" / component / "Dockerfile" for component in REPOSITORIES), *context_files()]:
        content = path.read_bytes()
        made.update(f"{path.relative_to(ROOT)} {len(content)} ".encode())
        made.update(content)
    return made.hexdigest()


def _require() -> None:
    if os.geteuid():
        raise BuildError("images are built as root")
    for program in _PROGRAMS:
        required(program)


def _build(folder: Path, key: str, say: Say) -> dict[str, Image]:
    buildah = Buildah(folder, say=say)
    buildah.remove_unfinished()
    _forget_old(folder, buildah)
    base, found = ensure_base(buildah, folder / "scratch", say), {}
    with tempfile.TemporaryDirectory(prefix="settings-", dir=folder / "scratch") as settings:
        mounts, arguments = installer_mounts(Path(settings)), {"BASE": base, "VERSION": version(), "REVISION": _revision()}
        for component, repository in REPOSITORIES.items():
            began = time.monotonic()
            dockerfile, built, tools = ROOT / "images" / component / "Dockerfile", _built_name(component, key), _tools_name(component, key)
            # An image of its own: this buildah cannot mount a stage that it built before, and keeps for long only what has a name.
            buildah.build(tools, dockerfile, ROOT, arguments={"BASE": base}, mounts=mounts, target="tools")
            buildah.build(built, dockerfile, ROOT, arguments=arguments, mounts=mounts, stages={"tools": tools})
            found[component] = replace(buildah.image(built), name=f"{REGISTRY}/{repository}:{version()}")
            say(f"{found[component].name}: built in {time.monotonic() - began:.0f} s, {found[component].n_bytes / 1e6:.0f} MB")
    return found


def _forget_old(folder: Path, buildah: Buildah) -> None:
    """But for those that were used last, of which one less than is kept, since others come now."""
    records = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for record in records[_KEPT - 1 :]:
        record.unlink()
    kept = [
        name(component, record.stem) for record in records[: _KEPT - 1] for component in REPOSITORIES for name in (_built_name, _tools_name)
    ]
    buildah.keep([base_name(), *kept])


def _built_name(component: str, key: str) -> str:
    """In the builder's storage, where those of several trees are."""
    return f"localhost/built-{component}:{key[:12]}"


def _tools_name(component: str, key: str) -> str:
    return f"localhost/tools-{component}:{key[:12]}"


def _revision() -> str:
    """Of the tree; empty where it is no clone."""
    command = ["git", "describe", "--always", "--abbrev=40", "--match=", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_GIT_LIMIT)
    return done.stdout.strip()


def _record(record: Path, found: Mapping[str, Image]) -> None:
    written = record.with_suffix(".new")
    written.write_text(json.dumps({component: asdict(image) for component, image in found.items()}, default=str))
    written.replace(record)


def _recorded(record: Path) -> dict[str, Image] | None:
    """None where they are not there."""
    try:
        read: dict[str, Any] = json.loads(record.read_text())
    except FileNotFoundError:
        return None
    found = {component: _parse(image) for component, image in read.items()}
    return found if all(layer.folder.is_dir() for image in found.values() for layer in image.layers) else None


def _parse(image: dict[str, Any]) -> Image:
    layers = tuple(Layer(digest=layer["digest"], folder=Path(layer["folder"])) for layer in image["layers"])
    return Image(**{**image, "layers": layers})


def main() -> None:
    try:
        for image in images().values():
            say_on_stderr(f"{image.name}: {image.n_bytes / 1e6:.0f} MB")
    except BuildError as error:
        raise SystemExit(f"images: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("images: interrupted; what was built is kept") from None


if __name__ == "__main__":
    main()
