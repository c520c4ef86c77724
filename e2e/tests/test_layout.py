"""The tree says what it says in the docs: component folders, small modules, generated code, a complete lock."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("core", "operator", "router", "node-agent", "engine", "cli", "e2e", "protos")
MAX_LINES = 400
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


def _tracked() -> list[Path]:
    """Files that git has or would take, so that a new file is checked before it is committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout
    return [path for line in listed.splitlines() if (path := ROOT / line).is_file()]


TRACKED = _tracked()
MODULES = [p for p in TRACKED if p.suffix == ".py" and not GENERATED.search(p.name)]
TEST_FILES = [p for p in MODULES if p.name.startswith("test_")]


def _shown(paths: list[Path]) -> list[str]:
    return [str(p.relative_to(ROOT)) for p in paths]


def test_component_folders_are_no_packages() -> None:
    # `operator/__init__.py` would shadow the standard library's operator for whoever starts at the root.
    wrong = [folder / "__init__.py" for name in COMPONENTS for folder in (ROOT / name, ROOT / name / "tests")]
    assert _shown([p for p in wrong if p.exists()]) == []


def test_there_is_no_conftest() -> None:
    assert _shown([p for p in MODULES if p.name == "conftest.py"]) == []


def test_every_module_is_short() -> None:
    # One that is longer has two reasons to exist.
    assert _shown([p for p in MODULES if len(p.read_text().splitlines()) >= MAX_LINES]) == []


def test_every_module_of_a_package_says_why_it_exists() -> None:
    packages = [p for p in MODULES if p.parts[len(ROOT.parts)] in COMPONENTS and p not in TEST_FILES]
    assert _shown([p for p in packages if not re.match(r'r?"""', p.read_text())]) == []


def test_names_of_test_files_are_unique() -> None:
    names = [p.name for p in TEST_FILES]
    assert sorted({n for n in names if names.count(n) > 1}) == []


def test_every_test_file_carries_a_marker() -> None:
    marked = re.compile(r"^(pytestmark = .*|@|.*\bmarks=)pytest\.mark\.(cpu|engine|cluster|gpu)\b", re.M)
    assert _shown([p for p in TEST_FILES if not marked.search(p.read_text())]) == []


def test_generated_protobuf_code_equals_its_source(tmp_path: Path) -> None:
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    command = [sys.executable, str(ROOT / "scripts/generate_protos.py"), str(tmp_path)]
    subprocess.run(command, check=True, env=environment, timeout=120)
    committed = {str(p.relative_to(ROOT / "protos")): p.read_text() for p in TRACKED if GENERATED.search(p.name)}
    generated = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*_pb2*")}
    assert sorted(committed) == sorted(generated)
    assert [name for name in committed if committed[name] != generated[name]] == [], "run `make protos`"


def test_tracked_files_name_neither_this_machine_nor_a_package_index() -> None:
    # The words are put together here, so that this file does not contain what it looks for.
    machine = "|".join("/" + word + "/" for word in ("work", "root", "home/[a-z]+"))
    index = "|".join((r"pypi\." + "org", r"files\.python" + "hosted", r"index-" + r"url[ =]+\S*http"))
    forbidden = re.compile(f"(?<![A-Za-z0-9._-])({machine})|{index}")
    texts = {p: p.read_text(errors="replace") for p in TRACKED}
    found = [f"{p.relative_to(ROOT)}: {m[0]}" for p, text in texts.items() if (m := forbidden.search(text))]
    assert found == []


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def _normalized(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s;<>=!~\[]", requirement, maxsplit=1)[0]).lower()


def _locked() -> dict[str, str]:
    """Name to version, with every entry's hashes checked on the way."""
    entries = re.split(r"^(?=[a-z0-9])", (ROOT / "requirements.lock").read_text(), flags=re.M)
    locked = {}
    for entry in filter(None, entries):
        first = entry.splitlines()[0]
        name, version = re.match(r"([a-z0-9._-]+)==(\S+)", first).groups()  # type: ignore[union-attr]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), f"{first} has no hash"
        locked[_normalized(name)] = version
    return locked


def test_lock_has_hashes_and_all_that_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        *project["dependency-groups"].values(),
    ]
    wanted = {_normalized(r) for group in groups for r in group}
    locked = _locked()
    assert sorted(wanted - locked.keys()) == [], "run `make lock`"
    exact = dict(r.split("==") for group in groups for r in group if "==" in r)
    assert {name: locked[_normalized(name)] for name in exact} == exact


@pytest.mark.parametrize("script", ["setup", "phase", "lint"])
def test_scripts_are_plain_shell(script: str) -> None:
    subprocess.run(["sh", "-n", str(ROOT / "scripts" / script)], check=True, timeout=10)


def test_import_contracts_name_every_policy_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pure = next(c for c in project["tool"]["importlinter"]["contracts"] if c["name"].startswith("Core and policies"))
    policies = {".".join(p.parent.relative_to(ROOT).parts[1:]) for p in MODULES if p.match("policy/__init__.py")}
    assert policies <= set(pure["source_modules"])
