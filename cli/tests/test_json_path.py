"""JSONPath of print columns."""

import pytest

from aerostat_cli.json_path import find

pytestmark = pytest.mark.cpu

MODEL = {
    "metadata": {"name": "m", "labels": {"aerostat.dev/tier": "gold"}},
    "spec": {"models": [{"name": "a"}, {"name": "b"}]},
    "status": {"conditions": [{"type": "Loaded", "status": "False"}, {"type": "Ready", "status": "True"}]},
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (".metadata.name", ["m"]),
        ('.status.conditions[?(@.type=="Ready")].status', ["True"]),
        (".spec.models[1].name", ["b"]),
        (".spec.models[7].name", []),
        (".status.absent.deeper", []),
        (".metadata.name.deeper", []),
        (".metadata.name[0]", []),
        (r".metadata.labels.aerostat\.dev/tier", ["gold"]),
    ],
)
def test_paths_find_what_kubectl_finds(path: str, expected: list[str]) -> None:
    assert find(MODEL, path) == expected


@pytest.mark.parametrize("path", ["..name", ".a[?(@.n>1)]", "name", ".a[-1]", ".spec.models[*].name"])
def test_what_is_not_understood_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is not understood"):
        find(MODEL, path)
