"""What the Dockerfiles promise, read from them: who runs, what is pinned, what an image says of itself, what reaches a builder."""

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from aerostat_testing.kubernetes.chart import CHART
from aerostat_testing.kubernetes.images.build import REPOSITORIES, ROOT, context_files, version

pytestmark = pytest.mark.cpu

LOCKS: Final = {  # by what pyproject.toml calls it
    "operator": "images/operator/requirements.lock",
    "router": "images/router/requirements.lock",
    "agent": "images/agent/requirements.lock",
    "engine": "images/engines/requirements-cpu.lock",
    "engine-cpu": "images/engines/requirements-cpu.lock",
}
GPU_LOCK: Final = "images/engines/requirements-cuda.lock"
ALL_LOCKS: Final = sorted({*LOCKS.values(), GPU_LOCK, "images/build.lock"})


def instructions(component: str) -> list[tuple[str, str]]:
    """Word and rest of each, comments left out and lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "images" / component / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    found = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(word, re.sub(r"\s+", " ", rest.strip())) for word, _, rest in found]


def words(component: str, word: str) -> list[str]:
    return [rest for found, rest in instructions(component) if found == word]


def normalized(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s;<>=!~\[]", requirement, maxsplit=1)[0]).lower()


def locked(path: str) -> dict[str, str]:
    """Name to version, with every entry's hashes checked on the way."""
    found = {}
    for entry in filter(None, re.split(r"^(?=[a-z0-9])", (ROOT / path).read_text(), flags=re.M)):
        pinned = re.match(r"([a-z0-9._-]+)==(\S+)", entry)
        assert pinned, entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), f"{entry.splitlines()[0]} has no hash"
        found[normalized(pinned[1])] = pinned[2]
    return found


@pytest.fixture(params=sorted(REPOSITORIES))
def component(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_the_public_base_is_the_default_and_may_be_another(component: str) -> None:
    assert instructions(component)[0] == ("ARG", "BASE=python:3.11-slim-bookworm")
    origins = [rest.partition(" AS ") for rest in words(component, "FROM")]
    assert {origin for origin, _, _ in origins} - {stage for _, _, stage in origins} == {"${BASE}"}


def test_who_runs_is_nobody_special_and_a_number(component: str) -> None:
    (user,) = words(component, "USER")
    uid, _, gid = user.partition(":")
    ids = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurity"]
    assert (int(uid), int(gid)) == (ids["user"], ids["group"])


def test_an_image_says_what_it_is(component: str) -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', " ".join(words(component, "LABEL"))))
    assert labels.pop("title").startswith(f"aerostat {component}")
    assert labels == {"version": "${VERSION}", "revision": "${REVISION}", "source": "${SOURCE}", "licenses": "Apache-2.0"}
    assert f"VERSION={version()}" in words(component, "ARG")


def test_an_image_has_the_version_that_the_chart_asks_for() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version()


def test_the_chart_asks_for_these_images() -> None:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    (pool,) = values["nodePools"]
    asked = {name: values[name]["image"]["repository"] for name in ("operator", "router", "agent")}
    assert asked | {"engines": pool["image"]["repository"]} == REPOSITORIES


def test_nothing_is_fetched_by_address_and_nothing_is_a_shell_at_start(component: str) -> None:
    assert not words(component, "ADD")
    assert not words(component, "ENTRYPOINT")
    assert all("://" not in rest for _, rest in instructions(component))
    (command,) = words(component, "CMD")
    assert json.loads(command)[:2] == ["python3", "-m"]


def test_what_is_installed_is_checked_by_hash_and_runs_no_code_of_its_own(component: str) -> None:
    installs = [part.strip() for rest in words(component, "RUN") for part in rest.split("&&") if "pip install" in part]
    assert len(installs) == 4, "the installer, what makes our wheel, the wheel, and the libraries"
    for install in installs:
        assert "--require-hashes" in install or "--no-index" in install, install
        assert install.startswith("/opt/tools/bin/python -m pip ") or "--no-build" in install or "--no-index" in install, install


def test_libraries_come_before_our_own_packages(component: str) -> None:
    """So that a change of ours keeps the large layer."""
    final = instructions(component)
    final = final[max(index for index, (word, _) in enumerate(final) if word == "FROM") :]
    libraries = next(index for index, (word, rest) in enumerate(final) if word == "RUN" and "--require-hashes" in rest)
    copies = [(index, rest) for index, (word, rest) in enumerate(final) if word == "COPY"]
    assert [rest.split()[0] for index, rest in copies if index > libraries] == ["--from=packages"]
    assert all("/requirements" in rest for index, rest in copies if index < libraries)


def test_all_images_make_our_packages_in_the_same_steps() -> None:
    """So that they are made once."""

    def made(component: str) -> list[tuple[str, str]]:
        found = instructions(component)
        start = next(index for index, (word, rest) in enumerate(found) if word == "FROM" and rest.endswith(" AS tools"))
        end = max(index for index, (word, _) in enumerate(found) if word == "FROM")
        return found[start + 1 : end]

    assert made("operator") == made("router") == made("agent") == made("engines")


@pytest.mark.parametrize("path", ALL_LOCKS)
def test_every_lock_has_hashes_and_no_address(path: str) -> None:
    assert locked(path)
    assert "://" not in (ROOT / path).read_text()


@pytest.mark.parametrize("extra", sorted(LOCKS))
def test_an_image_installs_what_pyproject_asks_for_in_the_versions_of_the_tests(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {normalized(r) for r in (*project["dependencies"], *project["optional-dependencies"][extra])}
    found, tested = locked(LOCKS[extra]), locked("requirements.lock")
    assert sorted(wanted - found.keys()) == [], "run `make lock`"
    assert {name: tested.get(name) for name in found} == found, "run `make lock`"


def test_torch_and_sglang_are_in_the_engines_alone() -> None:
    for path in ALL_LOCKS:
        assert ("sglang" in locked(path)) == ("torch" in locked(path)) == path.startswith("images/engines/")


def test_engines_for_gpus_have_the_same_sglang_with_its_own_kernels() -> None:
    cpu, gpu = locked(LOCKS["engine"]), locked(GPU_LOCK)
    assert gpu["sglang"] == cpu["sglang"]
    assert {"sglang-kernel", "flashinfer-python"} <= gpu.keys()
    assert not {"sglang-kernel", "flashinfer-python"} & cpu.keys()
    assert {"pip"} <= gpu.keys() & cpu.keys(), "the preparer fetches by it"


def test_builders_see_our_packages_and_neither_tests_nor_anything_ignored() -> None:
    seen = {str(path.relative_to(ROOT)) for path in context_files()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout
    tracked = {name for name in listed.splitlines() if (ROOT / name).is_file()}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {name for name in tracked if name.startswith(tuple(f"{package}/" for package in packages))} <= seen
    assert not [name for name in seen if "/tests/" in name or name.startswith("e2e/")]
    assert all(Path(name).suffix != ".pyc" for name in seen)
