"""The part of Kubernetes' JSONPath that print columns use: `.a.b`, `.a[0]`, `.a[?(@.type=="Ready")].b`.

No recursion, no slices, no expressions, and no `[*]`, of which an API server prints the first value only: a CRD that asks for more
is refused loudly instead of printing half a column.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

_STEP: Final = re.compile(
    r"""\.(?P<field>(?:\\.|[\w/-])+)"""
    r"""|\[(?P<index>\d+)\]"""
    r"""|\[\?\(@\.(?P<key>\w+)==["'](?P<value>[^"']*)["']\)\]"""
)


def find(document: Any, path: str) -> list[Any]:
    """All values at the path; an absent one is no error. Raises ValueError for a path that is not understood."""
    found = [document]
    for step in _steps(path):
        found = [value for item in found for value in _take(item, step)]
    return found


def _steps(path: str) -> Iterator[re.Match[str]]:
    position = 0
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None:
            raise ValueError(f"JSONPath {path!r} is not understood from {path[position:]!r} on")
        yield step
        position = step.end()


def _take(item: Any, step: re.Match[str]) -> list[Any]:
    if step["field"] is not None:
        field = step["field"].replace("\\", "")
        return [item[field]] if isinstance(item, dict) and field in item else []
    if not isinstance(item, list):
        return []
    if step["index"] is not None:
        return item[int(step["index"]) :][:1]
    return [element for element in item if isinstance(element, dict) and str(element.get(step["key"])) == step["value"]]
