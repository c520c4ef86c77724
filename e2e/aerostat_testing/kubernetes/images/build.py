"""Builds the images of all components from `images/*/Dockerfile`, once, into the cache.

`make images` does so ahead of the tests; a fixture that misses them builds them as well. What nothing changed in is known by
a key and takes no time; a change of our own sources makes one small layer anew. Only the latest images are kept.
"""

import hashlib
import json
import os
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
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
_GIT_LIMIT: Final[Seconds] = 30.0


def images(*, cache: Path | None = None, say: Say | None = None) -> dict[str, Image]:
    """By component, built where they are not there yet: some minutes with nothing cached. Raises BuildError."""
    folder, say = (cache or default_cache()) / "images", say or say_on_stderr
    if (found := _recorded(folder)) is None:
        _require()
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder, "images", say):
            if (found := _recorded(folder)) is None:  # another process may have built them meanwhile
                found = _build(folder, say)
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
    for path in [ROOT / ".dockerignore", *(_dockerfile(component) for component in REPOSITORIES), *context_files()]:
        content = path.read_bytes()
        made.update(f"{path.relative_to(ROOT)} {len(content)} ".encode())
        made.update(content)
    return made.hexdigest()


def _dockerfile(component: str) -> Path:
    return ROOT / "images" / component / "Dockerfile"


def _require() -> None:
    if os.geteuid():
        raise BuildError("images are built as root")
    for program in _PROGRAMS:
        required(program)


def _build(folder: Path, say: Say) -> dict[str, Image]:
    key, buildah = _key(), Buildah(folder, say=say)
    buildah.remove_unfinished()
    base = ensure_base(buildah, folder / "scratch", say)
    names = {component: f"{REGISTRY}/{repository}:{version()}" for component, repository in REPOSITORIES.items()}
    tools = {component: f"localhost/aerostat-tools:{component}" for component in REPOSITORIES}
    with tempfile.TemporaryDirectory(prefix="settings-", dir=folder) as settings:
        mounts, arguments = installer_mounts(Path(settings)), {"BASE": base, "VERSION": version(), "REVISION": _revision()}
        for component, name in names.items():
            began = time.monotonic()
            # An image of its own: this buildah cannot mount a stage that it built before, and keeps for long only what has a name.
            buildah.build(tools[component], _dockerfile(component), ROOT, arguments={"BASE": base}, mounts=mounts, target="tools")
            stages = {"tools": tools[component]}
            buildah.build(name, _dockerfile(component), ROOT, arguments=arguments, mounts=mounts, stages=stages)
            say(f"{name}: built in {time.monotonic() - began:.0f} s, {buildah.image(name).n_bytes / 1e6:.0f} MB")
    buildah.keep([base, *names.values(), *tools.values()])
    found = {component: buildah.image(name) for component, name in names.items()}
    _record(folder, key, found)
    return found


def _revision() -> str:
    """Of the tree; empty where it is no clone."""
    command = ["git", "describe", "--always", "--abbrev=40", "--match=", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_GIT_LIMIT)
    return done.stdout.strip()


def _record(folder: Path, key: str, found: Mapping[str, Image]) -> None:
    written = folder / "images.json.new"
    written.write_text(json.dumps({"key": key, "images": {component: asdict(image) for component, image in found.items()}}, default=str))
    written.replace(folder / "images.json")


def _recorded(folder: Path) -> dict[str, Image] | None:
    """None where they are not those of this tree."""
    try:
        record: dict[str, Any] = json.loads((folder / "images.json").read_text())
    except FileNotFoundError:
        return None
    if record["key"] != _key():
        return None
    found = {component: _parse(image) for component, image in record["images"].items()}
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
