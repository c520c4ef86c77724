"""May this engine start beside those that hold memory now, and is the node what its Pools say? (design.md section 3: the ledger invariant)

    sum of weights + sum of runtime reserves + sum of KV budgets <= capacity of the instance

All figures of an engine are bytes over all devices of the instance.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from aerostat_core.ids import Bytes
from aerostat_core.quantities import format_size
from aerostat_core.specs import DeviceKind, InstanceSpec

MIN_SLACK_SHARE: Final = 0.05  # of the capacity, in the price of memory: the last bytes are dear, not infinitely so


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one engine holds from its start to its end."""

    weights: Bytes
    reserve: Bytes
    kv: Bytes

    @property
    def total(self) -> Bytes:
        return self.weights + self.reserve + self.kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    asked: Bytes
    there: Bytes
    message: str


def used_bytes(held: Iterable[Footprint]) -> Bytes:
    return sum(f.total for f in held)


def refuse(asked: Footprint, held: Iterable[Footprint], capacity: Bytes) -> Refusal | None:
    """None: it fits. Otherwise bytes asked and bytes there, in words too."""
    there = capacity - used_bytes(held)
    if asked.total <= there:
        return None
    message = (
        f"needs {format_size(asked.total)} (weights {format_size(asked.weights)}, KV {format_size(asked.kv)}, "
        f"runtime reserve {format_size(asked.reserve)}; {asked.total} bytes), "
        f"there are {format_size(max(there, 0))} of {format_size(capacity)} ({there} bytes): "
        "give the Pool's devices more memory, or lower the Model's memory.kvMin"
    )
    return Refusal(asked=asked.total, there=there, message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerMemory:
    """What the container of a node's engines may use. `shared`: what its /dev/shm may take of that; 0 without a limit."""

    limit: Bytes
    shared: Bytes


def refuse_node(specs: Iterable[InstanceSpec], container: ContainerMemory) -> str | None:
    """None: what the Pools of a node declare fits into the container in which its engines run. Otherwise why not, and what to change.

    Devices of kind CPU are host memory; a host pool is one for all instances of its Pool.
    """
    every = tuple(specs)
    devices = sum(s.device_bytes * s.tensor_parallel for s in every if s.device_kind is DeviceKind.CPU)
    pools = sum({(s.name.namespace, s.pool): s.host_pool_bytes for s in every}.values())
    if devices + pools == 0 or devices + pools + container.shared <= container.limit:
        return None
    return (
        f"Pools declare {format_size(devices)} of CPU devices and {format_size(pools)} of hostPool on this node, and its engines have "
        f"{format_size(container.limit)} with {format_size(container.shared)} of /dev/shm in it: "
        "lower the Pool's devices.count, devices.memory or hostPool, or raise the node pool's resources.limits.memory in the chart's values"
    )


def kv_tokens(budget: Bytes, bytes_per_token: Bytes, page_tokens: int) -> int:
    """Whole pages of tokens that a KV budget holds; 0 when it holds none."""
    return budget // (bytes_per_token * page_tokens) * page_tokens


def memory_price(base: float, used: Bytes, capacity: Bytes) -> float:
    """Mu of design.md section 6: seconds per byte, mu_0 x used / max(slack, 5 % of the capacity)."""
    if capacity <= 0:
        return 0.0
    return base * used / max(capacity - used, MIN_SLACK_SHARE * capacity)
