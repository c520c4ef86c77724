"""The reference in docs/ is what the generator makes of `crds/` now, and it leaves nothing out."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"
CRDS = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
KINDS = pytest.mark.parametrize("crd", CRDS, ids=[crd["spec"]["names"]["kind"] for crd in CRDS])


def schema_of(crd: Mapping[str, Any]) -> Any:
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def page_of(crd: Mapping[str, Any]) -> str:
    return (REFERENCE / f"{crd['spec']['names']['singular']}.md").read_text()


def nodes(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}".removeprefix("."))
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


def test_the_committed_reference_is_the_generated_one(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/generate_crd_reference.py"), "--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {p.name: p.read_text() for p in REFERENCE.iterdir()}, (
        "run scripts/generate_crd_reference.py and commit what it writes"
    )


@KINDS
def test_every_field_value_rule_and_column_is_in_it(crd: Mapping[str, Any]) -> None:
    page = page_of(crd)
    for path, schema in nodes(schema_of(crd)):
        for rule in schema.get("x-kubernetes-validations", ()):
            assert f"| {rule['message']} |" in page, path
        if path.startswith(("spec.", "status.")) and not path.endswith("[]"):
            rows = [line for line in page.splitlines() if line.startswith(f"| `{path}` |")]
            assert rows, path
            for value in schema.get("enum", ()):
                explanation = rows[0].partition(f"`{value}`: ")[2].partition("<br>")[0]
                assert len(explanation) > 5, f"{path} does not explain {value}"
    for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]:
        assert f"| {column['name']} | `{column['jsonPath'][1:]}` |" in page
