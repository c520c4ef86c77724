"""Tables of `aerostat get`, from the CRDs that ship."""

from pathlib import Path

import pytest
import yaml

from aerostat_cli.columns import age, columns_of, header, row

pytestmark = pytest.mark.cpu

CRDS = sorted((Path(__file__).resolve().parents[2] / "crds").glob("*.yaml"))


@pytest.mark.parametrize("path", CRDS, ids=lambda p: p.stem)
def test_every_shipped_column_can_be_printed(path: Path) -> None:
    crd = yaml.safe_load(path.read_text())
    columns = columns_of(crd, wide=True)
    empty = {"metadata": {"name": "x"}, "spec": {}}
    assert row(empty, columns, now=0) == ["x"] + [""] * len(columns)


def test_a_model_is_shown_as_kubectl_shows_it() -> None:
    crd = yaml.safe_load(next(p for p in CRDS if p.stem == "models").read_text())
    model = {
        "metadata": {"name": "smollm2", "creationTimestamp": "1970-01-01T00:01:00Z"},
        "status": {
            "pool": "cpu",
            "state": "Open",
            "instances": "1/1",
            "ttft": "210ms / 2s",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    columns = columns_of(crd, wide=False)
    assert header(columns) == ["NAME", "READY", "POOL", "STATE", "INSTANCES", "TTFT P95 / TARGET", "AGE"]
    assert row(model, columns, now=90) == ["smollm2", "True", "cpu", "Open", "1/1", "210ms / 2s", "30s"]


def test_columns_with_a_priority_are_for_wide_output() -> None:
    crd = yaml.safe_load(next(p for p in CRDS if p.stem == "instances").read_text())
    assert len(columns_of(crd, wide=False)) < len(columns_of(crd, wide=True))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (330, "5m30s"), (2520, "42m"), (10800, "3h"), (172800, "2d"), (-5, "0s")],
)
def test_ages_are_rounded_as_kubectl_rounds_them(seconds: int, expected: str) -> None:
    assert age("2026-01-01T00:00:00Z", now=1767225600 + seconds) == expected
