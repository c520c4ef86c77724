"""From what a watch has told and what is there now to the events in between. Pure."""

from collections.abc import Iterator, Mapping

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent


def differences(kind: Kind, old: Mapping[NamespacedName, Resource], new: Mapping[NamespacedName, Resource]) -> Iterator[WatchEvent]:
    """Deletions first. An object that was made anew under its name is another object: deleted and added."""
    for name, resource in old.items():
        if name not in new or not is_same(new[name], resource):
            yield WatchEvent(Change.DELETED, kind, resource)
    for name, resource in new.items():
        before = old.get(name)
        if before is None or not is_same(before, resource):
            yield WatchEvent(Change.ADDED, kind, resource)
        elif before["metadata"]["resourceVersion"] != resource["metadata"]["resourceVersion"]:
            yield WatchEvent(Change.MODIFIED, kind, resource)


def is_same(a: Resource, b: Resource) -> bool:
    """Whether they are states of one object."""
    return bool(a["metadata"]["uid"] == b["metadata"]["uid"])
