"""What people copy works: every sample, and every manifest in the documentation, passes the API server as it stands."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerostat_testing.kubernetes.apiserver import ApiServer

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SAMPLES = sorted((ROOT / "crds/samples").rglob("*.yaml"))
_FENCED = re.compile(r"^(?P<indent> *)```ya?ml\n(?P<text>.*?)^(?P=indent)```", re.S | re.M)


def manifests(text: str) -> Iterator[str]:
    """The fenced YAML blocks of a page that hold objects of ours."""
    for block in _FENCED.finditer(text):
        if "aerostat.dev/" in block["text"]:
            yield re.sub(rf"^{block['indent']}", "", block["text"], flags=re.M)


def objects(text: str) -> list[Any]:
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.mark.cpu
def test_manifests_are_found_in_a_page() -> None:
    ours = "```yaml\napiVersion: aerostat.dev/v1alpha1\nkind: SLO\n```\n"
    page = f"text\n\n{ours}\n  ```yaml\n  a: aerostat.dev/x\n  ```\n```yaml\nother: 1\n```\n"
    assert list(manifests(page)) == ["apiVersion: aerostat.dev/v1alpha1\nkind: SLO\n", "a: aerostat.dev/x\n"]


@pytest.mark.cpu
def test_samples_are_objects_of_ours() -> None:
    assert SAMPLES
    for sample in SAMPLES:
        assert all(o["apiVersion"].startswith("aerostat.dev/") for o in objects(sample.read_text())), sample


@pytest.mark.cluster
@pytest.mark.parametrize("sample", [pytest.param(sample, id=str(sample.relative_to(ROOT))) for sample in SAMPLES])
def test_a_sample_passes(apiserver: ApiServer, namespace: str, sample: Path) -> None:
    said = apiserver.kubectl("apply", "--dry-run=server", "--validate=strict", f"--namespace={namespace}", "--filename", str(sample))
    assert said.count("created (server dry run)") == len(objects(sample.read_text()))


@pytest.mark.cluster
def test_the_manifests_in_the_documentation_pass(apiserver: ApiServer, namespace: str) -> None:
    command = ("apply", "--dry-run=server", "--validate=strict", f"--namespace={namespace}", "--filename=-")
    for page in PAGES:
        for manifest in manifests(page.read_text()):
            assert apiserver.kubectl(*command, stdin=manifest).count("(server dry run)") == len(objects(manifest)), page
