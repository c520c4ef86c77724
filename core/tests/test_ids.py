"""`namespace/name` is written and read in one place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.ids import NamespacedName

pytestmark = pytest.mark.cpu

PART = st.text(min_size=1).filter(lambda text: "/" not in text)


@given(PART, PART)
def test_what_is_written_is_read_back(namespace: str, name: str) -> None:
    full = NamespacedName(namespace, name)
    assert NamespacedName.parse(str(full)) == full


@pytest.mark.parametrize("text", ["", "name", "/name", "namespace/", "a/b/c", "/"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected namespace/name"):
        NamespacedName.parse(text)


def test_siblings_share_the_namespace() -> None:
    assert NamespacedName("a", "b").sibling("c") == NamespacedName("a", "c")


def test_names_sort_by_namespace_first() -> None:
    names = [NamespacedName("b", "a"), NamespacedName("a", "z"), NamespacedName("a", "b")]
    assert [str(name) for name in sorted(names)] == ["a/b", "a/z", "b/a"]
