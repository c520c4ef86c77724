"""What the cluster holds, as far as watches and our own writes told: a plan needs no list call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent

Key = tuple[Kind, NamespacedName]


class Mirror:
    """Own writes count at once. The newest version counts, whether a watch, a list or the answer to a write delivers it later."""

    def __init__(self) -> None:
        self._objects: dict[Key, Resource] = {}
        self._own_statuses: dict[Key, Resource] = {}  # nobody else writes the status of a Model, Pool or SLO
        self._synced: set[Kind] = set()
        self._removed: set[Key] | None = None  # what goes while a list is under way, which may still have it

    @property
    def is_synced(self) -> bool:
        """Every kind has been delivered once: what is not here does not exist."""
        return self._synced == set(Kind)

    @property
    def objects(self) -> Mapping[Key, Resource]:
        own = self._own_statuses
        return {key: r if key not in own else {**r, "status": own[key]} for key, r in self._objects.items()}

    def observe(self, event: WatchEvent) -> Key | None:
        """Take a watch event in. The key of the object that is different now, if any."""
        if event.resource is None:
            self._synced.add(event.kind)
            return None
        key = (event.kind, name_of(event.resource))
        if event.change is Change.DELETED:
            return key if self._remove(key, event.resource) else None
        present = self._objects.get(key)
        if present is not None and _is_older(event.resource, present):
            return None
        if present is not None and not _is_same(event.resource, present):
            self._own_statuses.pop(key, None)
        self._objects[key] = event.resource
        return key

    @contextmanager
    def listing(self, kind: Kind) -> Iterator[Callable[[Sequence[Resource]], list[Key]]]:
        """While a list is under way. What is called with its answer takes it in and gives the keys of what is different now.

        What a watch or a write of ours told meanwhile is newer than the answer.
        """
        before = {key: resource for key, resource in self._objects.items() if key[0] is kind}
        self._removed = set()

        def take(resources: Sequence[Resource]) -> list[Key]:
            removed = self._removed or set()
            there = {(kind, name_of(resource)) for resource in resources}
            gone = [key for key, resource in before.items() if key not in there and self._remove(key, resource)]
            events = [WatchEvent(Change.ADDED, kind, resource) for resource in resources if (kind, name_of(resource)) not in removed]
            news = [event for event in events if not self._has(event)]
            changed = [key for event in news if (key := self.observe(event)) is not None]
            self._synced.add(kind)
            return [*gone, *changed]

        try:
            yield take
        finally:
            self._removed = None

    def _has(self, event: WatchEvent) -> bool:
        """Exactly this version of it."""
        assert event.resource is not None, "an object is listed"
        present = self._objects.get((event.kind, name_of(event.resource)))
        return present is not None and present["metadata"]["resourceVersion"] == event.resource["metadata"]["resourceVersion"]

    def version_of(self, key: Key) -> str | None:
        """None: it is not there."""
        present = self._objects.get(key)
        return None if present is None else str(present["metadata"]["resourceVersion"])

    def applied(self, kind: Kind, resource: Resource) -> None:
        """The answer to a write. A watch may have told already what somebody else wrote upon it."""
        self.observe(WatchEvent(Change.MODIFIED, kind, resource))

    def patched(self, key: Key, status: Resource) -> None:
        if key in self._objects:  # else it has gone meanwhile, and the next one of that name begins without it
            self._own_statuses[key] = status

    def removed(self, key: Key) -> None:
        if self._removed is not None and key in self._objects:
            self._removed.add(key)
        self._objects.pop(key, None)
        self._own_statuses.pop(key, None)

    def forget_own_statuses(self) -> None:
        """From now on what the watches told counts, so that a status that somebody else damaged is written again."""
        self._own_statuses.clear()

    def _remove(self, key: Key, resource: Resource) -> bool:
        present = self._objects.get(key)
        if present is None or not _is_same(resource, present):
            return False  # another object has the name already
        self.removed(key)
        return True


def _is_same(a: Resource, b: Resource) -> bool:
    return bool(a["metadata"].get("uid") == b["metadata"].get("uid"))


def _is_older(new: Resource, present: Resource) -> bool:
    """Of the same object, an earlier version (resource versions are numbers that grow)."""
    return _is_same(new, present) and int(new["metadata"]["resourceVersion"]) < int(present["metadata"]["resourceVersion"])
