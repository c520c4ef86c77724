"""What can be said of the chart without helm: copies are copies, values are described by a schema that knows nothing else."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from aerostat_testing.kubernetes.chart import CHART

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))


def merged(under: Any, over: Any) -> Any:
    """As helm does it: maps are merged, everything else is replaced."""
    if isinstance(under, dict) and isinstance(over, dict):
        return {key: merged(under.get(key), over[key]) if key in over else under[key] for key in under.keys() | over.keys()}
    return over


def objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for child in schema.values():
            yield from objects(child)
    elif isinstance(schema, list):
        for child in schema:
            yield from objects(child)


def test_helm_is_given_no_crds() -> None:
    """Helm 3 would never update them, Helm 4 would also put old ones over new ones: a hook brings them."""
    assert not (CHART / "crds").exists()


def test_the_crds_say_the_version_of_the_product() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for path in (ROOT / "crds").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["metadata"]["labels"]["app.kubernetes.io/version"] == version, path.name


def test_the_chart_has_the_version_of_the_product() -> None:
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{metadata["appVersion"]}"\n' in project


def test_the_schema_is_one_and_takes_the_defaults() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator(SCHEMA).validate(DEFAULTS)


@pytest.mark.parametrize("values", [pytest.param(path, id=path.name) for path in VALUES])
def test_the_schema_takes_the_example_values(values: Path) -> None:
    Draft202012Validator(SCHEMA).validate(merged(DEFAULTS, yaml.safe_load(values.read_text())))


def test_every_default_is_in_the_schema_and_the_other_way_round() -> None:
    assert set(SCHEMA["properties"]) - {"global"} == set(DEFAULTS)
    for name, part in DEFAULTS.items():
        if isinstance(part, dict):
            assert set(SCHEMA["properties"][name]["properties"]) == set(part), name


def test_an_unknown_value_is_refused_wherever_it_stands() -> None:
    """Maps of the user's own (labels, quantities) and Kubernetes' own selectors are the exceptions."""
    for schema in objects(SCHEMA):
        is_map = "additionalProperties" in schema and schema["additionalProperties"] is not False
        is_foreign = schema == {"type": "object"} or "description" in schema
        assert schema.get("additionalProperties") is False or is_map or is_foreign, schema
