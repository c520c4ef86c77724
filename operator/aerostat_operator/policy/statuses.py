"""Statuses that the operator writes, as values, and how conditions carry on from the previous ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from aerostat_core.ids import NamespacedName, PoolName, Seconds
from aerostat_core.specs import Condition, EngineState, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """`instances` and `ttft` are print columns: open replicas of the wanted ones, p95 and target."""

    name: NamespacedName
    generation: int
    conditions: tuple[Condition, ...]
    url: str
    pool: PoolName | None
    state: EngineState
    replicas: int
    instances: str
    ttft: str
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """`instances` is a print column: ready ones of those that exist."""

    name: NamespacedName
    generation: int
    conditions: tuple[Condition, ...]
    nodes: int
    instances: str
    models: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SloStatus:
    name: NamespacedName
    generation: int
    conditions: tuple[Condition, ...]
    models: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidStatus:
    """Of an object that cannot be read: nothing but why."""

    kind: str
    name: NamespacedName
    conditions: tuple[Condition, ...]


def condition(kind: str, holds: bool, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="True" if holds else "False", reason=reason, message=message)


def carried_on(conditions: Iterable[Condition], previous: Sequence[Condition], *, generation: int, now: Seconds) -> tuple[Condition, ...]:
    """The time of the last transition stays while the status does; the generation is the one that was looked at."""
    before = {c.type: c for c in previous}
    stamp = format_time(now)
    settled = []
    for c in conditions:
        old = before.get(c.type)
        since = old.last_transition_time if old is not None and old.status == c.status and old.last_transition_time else stamp
        settled.append(replace(c, observed_generation=generation, last_transition_time=since))
    return tuple(settled)


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((c for c in conditions if c.type == kind), None)


def seconds_in_status(c: Condition | None, now: Seconds) -> Seconds:
    """How long a condition has had its status; 0 where nobody knows."""
    return max(now - parse_time(c.last_transition_time), 0.0) if c is not None and c.last_transition_time else 0.0


def format_time(wall: Seconds) -> str:
    """RFC 3339 in whole seconds, as the API has it."""
    return datetime.fromtimestamp(int(wall), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> Seconds:
    """Seconds since 1970. Raises ValueError for what is no RFC 3339 time."""
    return datetime.fromisoformat(text).timestamp()
