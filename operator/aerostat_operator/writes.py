"""The difference between a plan and what is there, as writes; and the notes that go with them. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, parse_conditions, parse_instance
from aerostat_core.specs import Condition, InstanceSpec
from aerostat_operator.builders import (
    instance_resource,
    instance_spec_resource,
    invalid_status_resource,
    model_status_resource,
    pool_status_resource,
    slo_status_resource,
)
from aerostat_operator.mirror import Key
from aerostat_operator.policy.plan import Plan
from aerostat_operator.policy.statuses import find
from aerostat_operator.reading import UNREADABLE
from aerostat_runtime.cluster.port import Kind, Note


class Verb(Enum):
    APPLY = "apply"
    DELETE = "delete"
    STATUS = "write the status of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One call to the cluster. `resource`: the object, the status, or None to delete it. `notes` are told once it is done."""

    verb: Verb
    kind: Kind
    name: NamespacedName
    resource: Resource | None = None
    notes: tuple[Note, ...] = ()

    @property
    def key(self) -> tuple[Verb, Kind, NamespacedName]:
        return self.verb, self.kind, self.name

    def __str__(self) -> str:
        return f"{self.verb.value} {self.kind.value} {self.name}"


def writes_of(plan: Plan, objects: Mapping[Key, Resource]) -> list[Write]:
    """Only what differs. Instances first: a status may say only what is already on its way."""
    return [*_applies(plan, objects), *_deletes(plan), *_statuses(plan, objects)]


def _applies(plan: Plan, objects: Mapping[Key, Resource]) -> Iterator[Write]:
    for spec in plan.instances:
        pool = objects.get((Kind.POOL, spec.name.sibling(spec.pool)))
        desired = instance_resource(spec, owner_uid=pool["metadata"].get("uid", "") if pool is not None else "")
        present = objects.get((Kind.INSTANCE, spec.name))
        if present is None or not _is_same(present, desired, spec):
            yield Write(verb=Verb.APPLY, kind=Kind.INSTANCE, name=spec.name, resource=desired)


def _deletes(plan: Plan) -> Iterator[Write]:
    for name in plan.obsolete:
        yield Write(verb=Verb.DELETE, kind=Kind.INSTANCE, name=name)


def _is_same(present: Resource, desired: Resource, spec: InstanceSpec) -> bool:
    """Compared in the form in which we write: what is there may have other units, or defaults."""
    meta = present["metadata"]
    if any(meta.get(part) != desired["metadata"][part] for part in ("labels", "ownerReferences")):
        return False
    try:
        there = parse_instance(present)
    except UNREADABLE:
        return False
    return instance_spec_resource(there) == instance_spec_resource(spec)


def _statuses(plan: Plan, objects: Mapping[Key, Resource]) -> Iterator[Write]:
    statuses: list[tuple[Kind, NamespacedName, tuple[Condition, ...], Resource]] = [
        *((Kind.POOL, s.name, s.conditions, pool_status_resource(s)) for s in plan.pools),
        *((Kind.SLO, s.name, s.conditions, slo_status_resource(s)) for s in plan.slos),
        *((Kind.MODEL, s.name, s.conditions, model_status_resource(s)) for s in plan.models),
        *((Kind(s.kind), s.name, s.conditions, invalid_status_resource(s)) for s in plan.invalid),
    ]
    for kind, name, conditions, status in statuses:
        there = objects[kind, name].get("status", {})
        notes = tuple(_transitions(kind, name, parse_conditions(there), conditions))
        if kind is Kind.POOL:
            notes += tuple(Note(kind=kind, name=name, reason="PlacementChanged", message=r) for r in plan.reasons.get(name, ()))
        if there != status or notes:
            yield Write(verb=Verb.STATUS, kind=kind, name=name, resource=status, notes=notes)


def _transitions(kind: Kind, name: NamespacedName, before: tuple[Condition, ...], after: tuple[Condition, ...]) -> Iterator[Note]:
    """What a person would want to know: it became ready or ceased to be, cannot be placed (and why, when that changes), is stuck."""
    for c in after:
        old = find(before, c.type)
        was, holds = old.status if old is not None else None, c.status == "True"
        if c.type == "Ready" and was != c.status and (holds or was == "True"):
            is_warning = not holds and not _is_expected(c, old, after)
            yield Note(kind=kind, name=name, reason="Ready" if holds else c.reason, message=c.message, warning=is_warning)
        if c.type == "Scheduled" and not holds and (old is None or old.status == "True" or old.reason != c.reason):
            yield Note(kind=kind, name=name, reason=c.reason, message=c.message, warning=True)
        if c.type == "Scheduled" and holds and was != "True":
            yield Note(kind=kind, name=name, reason=c.reason, message=c.message)
        if c.type in ("Stalled", "Conflict") and holds and (was != "True" or (old is not None and old.reason != c.reason)):
            yield Note(kind=kind, name=name, reason=c.reason, message=c.message, warning=True)


def _is_expected(ready: Condition, before: Condition | None, after: tuple[Condition, ...]) -> bool:
    """Not Ready any more, and nothing is wrong: it was edited or taken away, or it slept and is called."""
    progressing = find(after, "Progressing")
    is_waking = before is not None and before.reason == "ScaledToZero" and progressing is not None and progressing.status == "True"
    return is_waking or ready.reason in ("Updating", "Draining")
