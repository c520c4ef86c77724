"""Print columns of a kind, as its CRD declares them: `kubectl get` and `aerostat get` tell the same story.

Rows are text; how they are drawn is `commands.get`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from aerostat_cli.json_path import find
from aerostat_core.ids import Seconds
from aerostat_core.resources import Resource

NONE = ""  # what kubectl prints for an absent value of a column


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    type: str
    path: str
    wide: bool

    @classmethod
    def parse(cls, column: Resource) -> Self:
        """`priority` above 0 means: only with -o wide."""
        return cls(name=column["name"], type=column["type"], path=column["jsonPath"], wide=column.get("priority", 0) > 0)


def columns_of(crd: Resource, *, wide: bool) -> list[Column]:
    """Those of the CRD's first version."""
    parsed = [Column.parse(c) for c in crd["spec"]["versions"][0]["additionalPrinterColumns"]]
    return [c for c in parsed if wide or not c.wide]


def header(columns: Sequence[Column]) -> list[str]:
    return ["NAME", *(c.name.upper() for c in columns)]


def row(resource: Resource, columns: Sequence[Column], *, now: Seconds) -> list[str]:
    """`now` is wall-clock seconds, for ages."""
    return [resource["metadata"]["name"], *(_cell(resource, column, now) for column in columns)]


def _cell(resource: Resource, column: Column, now: Seconds) -> str:
    values = find(resource, column.path)
    if not values:
        return NONE
    if column.type == "date":
        return age(values[0], now=now)
    return _text(values[0])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def age(timestamp: str, *, now: Seconds) -> str:
    """How long ago, of an RFC 3339 timestamp."""
    return format_age(now - datetime.fromisoformat(timestamp).timestamp())


def format_age(seconds: Seconds) -> str:
    """As kubectl rounds it: `12s`, `5m30s`, `42m`, `3h`, `2d`."""
    seconds = max(0, round(seconds))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10 and seconds % 60:
        return f"{minutes}m{seconds % 60}s"
    if hours < 3:
        return f"{minutes}m"
    if days < 2:
        return f"{hours}h"
    return f"{days}d"
