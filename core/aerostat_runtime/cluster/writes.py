"""What an API server makes of a write: admission, identity, generations, what stays of the old object, garbage collection.

Where objects are kept, who writes alone and who is told are the adapter's.
"""

import uuid
from datetime import UTC, datetime
from typing import Protocol

from aerostat_core.clock import Clock
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.port import InvalidResourceError, Kind

_APPLIED_METADATA = ("labels", "annotations", "ownerReferences")
_SERVER_SET_METADATA = ("uid", "creationTimestamp", "generation", "resourceVersion")


class Objects(Protocol):
    """Where objects are kept. An object that was given out is the caller's own."""

    def list(self, kind: Kind) -> list[Resource]:
        """All objects of a kind, by namespace and name."""
        ...

    def get(self, kind: Kind, name: NamespacedName) -> Resource | None: ...

    def write(self, kind: Kind, name: NamespacedName, resource: Resource) -> Resource:
        """Stores it under the next resourceVersion, and returns what was stored."""
        ...

    def remove(self, kind: Kind, name: NamespacedName) -> bool:
        """False: there was none."""
        ...


class Writes:
    """Each call is one write and blocks as its objects do. Nobody else may write meanwhile."""

    def __init__(self, objects: Objects, admission: Admission, clock: Clock) -> None:
        self._objects = objects
        self._admission = admission
        self._clock = clock

    def apply(self, resource: Resource) -> Resource:
        kind = self._admission.kind_of(resource)
        name = _placed(resource)
        old = self._objects.get(kind, name)
        admitted = self._admission.admit(resource, old)
        applied = {key: admitted["metadata"][key] for key in _APPLIED_METADATA if admitted["metadata"].get(key)}
        if old is None:
            kept = self._new_metadata(name)
        else:
            kept = {key: value for key, value in old["metadata"].items() if key not in _APPLIED_METADATA}
            if old["spec"] != admitted["spec"]:
                kept["generation"] += 1
        new = {**admitted, "metadata": kept | applied} | ({"status": old["status"]} if old and "status" in old else {})
        if new == old:
            return new
        stored = self._objects.write(kind, name, new)
        if "ownerReferences" in applied:
            self.collect_garbage()  # an owner may have gone before its child came
        return stored

    def put(self, resource: Resource) -> Resource:
        """A Node, status and all; no schema is known for it."""
        if resource.get("kind") != Kind.NODE:
            raise InvalidResourceError(f"only a Node is put as it is, got {resource.get('kind')!r}: use apply")
        name = name_of(resource)
        old = self._objects.get(Kind.NODE, name)
        kept = self._new_metadata(name) if old is None else old["metadata"]
        server_set = {key: kept[key] for key in _SERVER_SET_METADATA if key in kept}
        new = {**resource, "metadata": resource["metadata"] | server_set}
        return new if new == old else self._objects.write(Kind.NODE, name, new)

    def patch_status(self, kind: Kind, name: NamespacedName, status: Resource) -> bool:
        old = self._objects.get(kind, name)
        if old is None:
            return False
        if kind is not Kind.NODE:
            self._admission.check_status(kind, name, status)
        if old.get("status") != status:
            self._objects.write(kind, name, {**old, "status": status})
        return True

    def delete(self, kind: Kind, name: NamespacedName) -> None:
        """It and what only it owned."""
        if self._objects.remove(kind, name):
            self.collect_garbage()

    def collect_garbage(self) -> None:
        """Delete objects whose owners are all gone."""
        while True:  # a child may own others
            objects = [(kind, resource) for kind in Kind for resource in self._objects.list(kind)]
            uids = {resource["metadata"].get("uid") for _, resource in objects}
            orphans = [(kind, name_of(resource)) for kind, resource in objects if _is_orphan(resource, uids)]
            for kind, name in orphans:
                self._objects.remove(kind, name)
            if not orphans:
                return

    def _new_metadata(self, name: NamespacedName) -> Resource:
        created = datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "name": name.name,
            "namespace": name.namespace,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": created,
            "generation": 1,
        }


def _placed(resource: Resource) -> NamespacedName:
    """Its name, or what admission will refuse anyway."""
    match resource.get("metadata"):
        case {"name": str(name), "namespace": str(namespace)}:
            return NamespacedName(namespace, name)
        case {"name": str(name)}:
            return NamespacedName("default", name)
        case _:
            return NamespacedName("default", "-")


def _is_orphan(resource: Resource, uids: set[str]) -> bool:
    owners = resource["metadata"].get("ownerReferences", ())
    return bool(owners) and all(owner["uid"] not in uids for owner in owners)
