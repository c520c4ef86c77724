"""Identifiers and units. A name that could be confused with another one has its own type."""

from typing import NamedTuple, NewType, Self

Seconds = float
Bytes = int

ModelName = NewType("ModelName", str)  # metadata.name of a Model
PoolName = NewType("PoolName", str)
InstanceName = NewType("InstanceName", str)
NodeName = NewType("NodeName", str)
SessionKey = NewType("SessionKey", str)  # hash of tenant and session id, as engines and agents know a session
LeaseId = NewType("LeaseId", str)
Epoch = NewType("Epoch", int)  # of an engine, an agent or a keeper: a later run has a larger one


class NamespacedName(NamedTuple):
    """An object's full name. The only place where `namespace/name` is written or read.

    A named tuple, since it is a key everywhere: hashing and comparing a dataclass costs a router a twentieth of a call's time.
    """

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """`namespace/name`. Raises ValueError for anything else."""
        namespace, slash, name = text.partition("/")
        if not (namespace and slash and name) or "/" in name:
            raise ValueError(f"expected namespace/name, got {text!r}")
        return cls(namespace, name)

    def sibling(self, name: str) -> Self:
        """Another object of the same namespace (references never leave it)."""
        return type(self)(self.namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
