"""The builder of images, with programs that only pretend: once for all who ask, resumed, quiet about the machine, loud when it fails."""

import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Final

import pytest

from aerostat_testing.kubernetes.caches import BuildError
from aerostat_testing.kubernetes.images import build, machine
from aerostat_testing.kubernetes.images.build import REPOSITORIES, ROOT, images

pytestmark = pytest.mark.cpu

# Of a storage it keeps a list of names. Each image has one layer, in the folder of that name.
BUILDAH: Final = """#!/usr/bin/env python3
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
words = [word for word in sys.argv[1:] if not word.startswith("--")]
root = pathlib.Path(options["root"])
known = root / "names"
names = set(known.read_text().split()) if known.exists() else set()
with open(here / "calls", "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
if words[0] == "bud":
    for line in ("STEP 1/2: FROM somewhere", "STEP 2/2: RUN true"):
        print(line)
    if (here / "broken").exists():
        sys.exit("no space left on device")
    layer = root / "overlay/one/diff"
    layer.mkdir(parents=True, exist_ok=True)
    (root / "overlay-layers").mkdir(exist_ok=True)
    (root / "overlay-layers/layers.json").write_text(json.dumps([{"id": "one", "diff-digest": "sha256:1"}]))
    names.add(options["tag"])
elif words[0] == "images":
    print(json.dumps([{"names": sorted(names)}, {"names": None}]))
elif words[0] == "inspect":
    manifest = {"layers": [{"digest": "sha256:1", "size": 7}]}
    print(json.dumps({"Manifest": json.dumps(manifest), "Config": json.dumps({"rootfs": {"diff_ids": ["sha256:1"]}})}))
elif words[0] == "rmi":
    names -= set(words[1:])
if names:
    root.mkdir(parents=True, exist_ok=True)
    known.write_text("\\n".join(names))
"""
UNSHARE: Final = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
DEBOOTSTRAP: Final = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/bases"
mkdir -p "$4/var/cache/apt/archives" "$4/usr/bin"
"""
APT: Final = """#!/bin/sh
echo "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release) http://archive.example/debian"
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what images are built from."""
    copy = tmp_path / "tree"
    for path in [*build.context_files(), ROOT / ".dockerignore", *(ROOT / "images" / name / "Dockerfile" for name in REPOSITORIES)]:
        (copy / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy / path.relative_to(ROOT))
    monkeypatch.setattr(build, "ROOT", copy)
    monkeypatch.setattr(build, "REPOSITORIES", {"router": REPOSITORIES["router"]})  # of each image the same is said
    return copy


@pytest.fixture
def programs(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of those that pretend."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in {"buildah": BUILDAH, "unshare": UNSHARE, "debootstrap": DEBOOTSTRAP, "apt-get": APT}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return folder


def built(programs: Path) -> list[str]:
    """Names, in order."""
    calls = [json.loads(line) for line in (programs / "calls").read_text().splitlines()]
    return [word.removeprefix("--tag=") for call in calls if "bud" in call for word in call if word.startswith("--tag=localhost/built-")]


def silent(_: str) -> None:
    pass


def test_all_images_are_built_once(programs: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = images(cache=tmp_path / "cache", say=said.append)
    assert {name: image.name for name, image in found.items()} == {
        name: f"localhost/{repository}:{build.version()}" for name, repository in build.REPOSITORIES.items()
    }
    assert found["router"].n_bytes == 7
    assert [layer.digest for layer in found["router"].layers] == ["sha256:1"]
    assert len(built(programs)) == len(found)
    assert len([line for line in said if "built in" in line]) == len(found)
    assert images(cache=tmp_path / "cache", say=said.append) == found
    assert len(built(programs)) == len(found)


def test_a_change_of_what_goes_into_them_builds_them_anew_upon_the_same_base(programs: Path, tree: Path, tmp_path: Path) -> None:
    images(cache=tmp_path / "cache", say=silent)
    with (tree / "core/aerostat_core/ids.py").open("a") as file:
        file.write("\n# changed\n")
    images(cache=tmp_path / "cache", say=silent)
    assert len(built(programs)) == 2
    assert len((programs / "bases").read_text().splitlines()) == 1


def test_of_older_images_only_the_last_ones_are_kept(programs: Path, tree: Path, tmp_path: Path) -> None:
    """Those of two trees that take turns, so that neither builds at each turn."""
    for turn in range(3):
        (tree / "LICENSE").write_text(f"turn {turn}")
        images(cache=tmp_path / "cache", say=silent)
    names = (tmp_path / "cache/component-images/storage/names").read_text().split()
    assert sorted(name for name in names if "/built-" in name) == sorted(built(programs)[1:])
    (tree / "LICENSE").write_text("turn 1")
    images(cache=tmp_path / "cache", say=silent)
    assert len(built(programs)) == 3


def test_layers_that_are_gone_are_built_again(programs: Path, tmp_path: Path) -> None:
    found = images(cache=tmp_path / "cache", say=silent)
    found["router"].layers[0].folder.rmdir()
    images(cache=tmp_path / "cache", say=silent)
    assert len(built(programs)) == 2


def test_a_failure_says_what_the_builder_said_and_counts_for_nothing(programs: Path, tmp_path: Path) -> None:
    (programs / "broken").touch()
    with pytest.raises(BuildError, match="no space left on device"):
        images(cache=tmp_path / "cache", say=silent)
    (programs / "broken").unlink()
    assert images(cache=tmp_path / "cache", say=silent).keys() == {"router"}


def test_a_missing_builder_is_named_with_what_installs_it(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="images need apt-get: run `make cluster-tools`"):
        images(cache=tmp_path / "cache", say=silent)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BuildError, match="as root"):
        images(cache=tmp_path / "cache", say=silent)


def test_builds_install_as_this_machine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = tmp_path / "ca.crt"
    certificates.touch()
    monkeypatch.setenv("PIP_INDEX_URL", "https://someone:secret@mirror.example/simple")
    monkeypatch.setenv("PIP_CERT", str(certificates))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    for variable in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"):
        monkeypatch.delenv(variable, raising=False)
    mounts = machine.installer_mounts(tmp_path / "settings")
    assert f"{certificates}:/etc/ssl/certs/ca-certificates.crt:ro" in mounts
    assert "secret" not in "".join(mounts), "it would be in the list of processes"
    uv = tomllib.loads((tmp_path / "settings/uv/uv.toml").read_text())
    assert uv["index-url"] == "https://someone:secret@mirror.example/simple"
    assert uv["index-url"] in (tmp_path / "settings/pip/pip.conf").read_text()
    assert f"{tmp_path / 'uv'}:{uv['cache-dir']}" in mounts
