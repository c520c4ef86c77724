"""What an API server is to us, and no more: `Cluster` for the objects, `Secrets` for the one program that reads any.

Adapters: a state folder (`folder`, for standalone), a Kubernetes API server (`kubernetes`), and objects in memory (for tests, in
`aerostat_testing`). One conformance suite runs over all of them. Objects are JSON as the API has them; `aerostat_core.resources`
reads them.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from aerostat_core.errors import PermanentError
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource


class Kind(StrEnum):
    MODEL = "Model"
    POOL = "Pool"
    SLO = "SLO"
    INSTANCE = "Instance"
    NODE = "Node"


class Change(StrEnum):
    ADDED = "Added"
    MODIFIED = "Modified"
    DELETED = "Deleted"
    SYNCED = "Synced"  # all that existed when the watch began has been delivered


@dataclass(frozen=True, slots=True)
class WatchEvent:
    change: Change
    kind: Kind
    resource: Resource | None  # None only for SYNCED


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that a person would want to know about an object: a Kubernetes Event."""

    kind: Kind
    name: NamespacedName
    reason: str  # CamelCase
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong with one field. `path` as people write it: `spec.models[0].name`; empty for the whole object."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidResourceError(PermanentError):
    """Schema or a validation rule refuses the object; the message is the rule's own.

    `violations` has it by field where the adapter knows; an adapter that has only the server's text leaves it empty.
    """

    def __init__(self, message: str, violations: tuple[Violation, ...] = ()) -> None:
        super().__init__("Invalid", message)
        self.violations = violations


class Cluster(Protocol):
    """Waits inside are bounded; outages are retried by the adapter, a watch survives them and delivers what it missed."""

    async def list(self, kind: Kind) -> list[Resource]: ...

    def watch(self, kind: Kind) -> AsyncIterator[WatchEvent]:
        """All present objects as ADDED, then SYNCED, then changes. Ends only when the iterator is closed."""
        ...

    async def apply(self, resource: Resource) -> Resource:
        """Create or update `metadata.labels`, `metadata.ownerReferences` and `spec`; status stays.

        An apply that changes nothing writes nothing. Raises InvalidResourceError.
        """
        ...

    async def patch_status(self, kind: Kind, name: NamespacedName, status: Resource) -> bool:
        """Replace the status; unchanged writes nothing. False: the object is gone, which is no error."""
        ...

    async def delete(self, kind: Kind, name: NamespacedName) -> None:
        """Delete it; absent already is no error."""
        ...

    async def note(self, note: Note) -> None:
        """Record an event. Best effort: nothing depends on it."""
        ...

    async def close(self) -> None: ...


class Secrets(Protocol):
    async def secret(self, name: NamespacedName) -> Mapping[str, bytes]:
        """What a Secret holds now, by key; nothing of it is kept here.

        Raises PermanentError or TemporaryError for one that cannot be had; the message says what to do.
        """
        ...


class Adapter(Cluster, Secrets, Protocol):
    """All that an adapter is; each program hands its parts on only what they use."""
