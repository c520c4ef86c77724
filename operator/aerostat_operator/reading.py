"""From the objects that watches delivered to a `World`. An object that cannot be read is set aside, with the reason; the others go on."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import (
    Resource,
    parse_conditions,
    parse_instance,
    parse_instance_status,
    parse_model,
    parse_node,
    parse_pool,
    parse_slo,
)
from aerostat_core.specs import InstanceStatus
from aerostat_operator.policy.statuses import parse_time
from aerostat_operator.policy.world import InstanceView, World
from aerostat_runtime.cluster.port import Kind

# What parsing raises for an object that a schema let through, or that was written before there was one.
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)
T = TypeVar("T")
Objects = Mapping[tuple[Kind, NamespacedName], Resource]


def read_world(objects: Objects) -> World:
    unreadable: dict[tuple[str, NamespacedName], str] = {}

    def read(kind: Kind, parse: Callable[[Resource], T]) -> tuple[T, ...]:
        found = []
        for (of, name), resource in sorted(objects.items(), key=lambda item: item[0][1]):
            if of is not kind or "deletionTimestamp" in resource["metadata"]:
                continue
            try:
                found.append(parse(resource))
            except UNREADABLE as error:
                unreadable[kind.value, name] = f"{type(error).__name__}: {error}"
        return tuple(found)

    return World(
        models=read(Kind.MODEL, parse_model),
        pools=read(Kind.POOL, parse_pool),
        slos=read(Kind.SLO, parse_slo),
        nodes=read(Kind.NODE, parse_node),
        instances=read(Kind.INSTANCE, _read_instance),
        conditions={
            (kind.value, name): parse_conditions(resource.get("status", {}))
            for (kind, name), resource in objects.items()
            if kind in (Kind.MODEL, Kind.POOL, Kind.SLO)
        },
        unreadable=unreadable,
    )


def _read_instance(resource: Resource) -> InstanceView:
    """A status that cannot be read counts as none: its agent writes it anew, and what its spec lists stays known."""
    spec = parse_instance(resource)
    try:
        status = parse_instance_status(resource)
        if status.heartbeat:
            parse_time(status.heartbeat)
    except UNREADABLE:
        status = InstanceStatus(name=spec.name, agent_epoch=0, heartbeat="", agent_address="")
    return InstanceView(spec=spec, status=status)
