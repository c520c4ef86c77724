"""Documents know their lines, and what cannot be read says where."""

from contextlib import suppress

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from aerostat_runtime.cluster.manifest_files import MAX_VALUES, ManifestSyntaxError, parse_json, parse_yaml

pytestmark = pytest.mark.cpu

TWO = """\
# a comment first
kind: Pool
metadata:
  name: a
---

kind: Model
spec:
  items:
    - x: 1
    - y: [1, 2,
          3]
  a.b: {c: d}
"""


def test_each_document_knows_where_it_begins() -> None:
    assert [(d.line, d.resource["kind"]) for d in parse_yaml(TWO)] == [(2, "Pool"), (7, "Model")]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("", 7),
        ("kind", 7),
        ("spec.items", 9),
        ("spec.items[1]", 11),
        ("spec.items[1].y[2]", 12),
        ("spec.items[7].y", 9),
        ("spec.a.b.c", 13),
        ("spec.missing", 8),
        ("status.missing", 7),
    ],
)
def test_a_field_is_found_by_its_path(path: str, line: int) -> None:
    assert parse_yaml(TWO)[1].line_of(path) == line


def test_empty_documents_are_none() -> None:
    assert parse_yaml("") == []
    assert parse_yaml("---\n# only a comment\n---\n---\n") == []


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a: [1,\nb: 2", 2, "no YAML"),
        ("a: 1\n b: 2", 2, "mapping values are not allowed"),
        ("a:\n\t- 1", 2, "cannot start any token"),
        ("a: 1\nb: 2\na: 3", 3, "'a' stands twice"),
        ("a: 1\nb: \x07", 2, "special characters are not allowed"),
        ("a: *nobody", 1, "undefined alias"),
        ("a: !!python/object:os.system x", 1, "could not determine a constructor"),
        ("a: !!int x", 1, "no YAML"),
        ("ok: 1\n---\n1: 2", 3, "JSON cannot hold"),
        ("a: .nan", 1, "numbers must be finite"),
        ("a: -.inf", 1, "numbers must be finite"),
        ("a: !!binary aGk=", 1, "JSON cannot hold"),
        ("&a [*a]", 1, "aliases written out"),
        ("[" * 5000, 1, "no YAML"),
    ],
)
def test_what_is_no_manifest_says_where_and_why(text: str, line: int, said: str) -> None:
    with pytest.raises(ManifestSyntaxError, match=said) as refused:
        parse_yaml(text)
    assert refused.value.line == line


def test_dates_stay_text() -> None:
    (document,) = parse_yaml("a: 2026-05-01\nb: 2026-05-01T10:00:00Z")
    assert document.resource == {"a": "2026-05-01", "b": "2026-05-01T10:00:00Z"}


def test_json_is_one_document() -> None:
    (document,) = parse_json('{\t"kind": "Pool", "n": [1, null]}')
    assert document.resource == {"kind": "Pool", "n": [1, None]}
    assert document.line_of("kind") == 1


@pytest.mark.parametrize(
    ("text", "line"), [("", 1), ('{"a": 1,\n "b": }', 2), ('{"a": 1, "a": 2}', 1), ('{"a": NaN}', 1), ("[" * 5000, 1), ('{"kind"', 1)]
)
def test_bad_json_says_where(text: str, line: int) -> None:
    with pytest.raises(ManifestSyntaxError) as refused:
        parse_json(text)
    assert refused.value.line == line


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=3))
def test_what_yaml_writes_is_read_back(documents: list[dict[str, object]]) -> None:
    text = yaml.safe_dump_all(documents)
    assert [d.resource for d in parse_yaml(text)] == documents


@given(st.text(max_size=60), st.integers(0, len(TWO)))
def test_any_text_is_read_or_refused(noise: str, cut: int) -> None:
    """Half-written or not: never another error."""
    for text in (noise, TWO[:cut], TWO[:cut] + noise):
        for parse in (parse_yaml, parse_json):
            with suppress(ManifestSyntaxError):
                assert all(d.line_of("spec.a[0].b") >= 1 for d in parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 x\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)),
        "a0: &a0 {k: x}\n" + "".join(f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}}}\n" for i in range(1, 40)),
        "a: &a [*a]",
        "a: &a {b: *a}",
        f"[{'1, ' * MAX_VALUES}]",
    ],
)
def test_a_small_file_that_stands_for_very_much_is_refused_at_once(text: str) -> None:
    with pytest.raises(ManifestSyntaxError, match="with its aliases written out") as refused:
        parse_yaml(text)
    assert refused.value.line == 1


def test_aliases_are_as_good_as_what_they_stand_for() -> None:
    assert parse_yaml("a: &a [1, 2]\nb: *a\nc: {<<: {d: *a}}")[0].resource == {"a": [1, 2], "b": [1, 2], "c": {"d": [1, 2]}}
