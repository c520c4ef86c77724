"""May this engine start beside those that hold memory now? (design.md section 3: the ledger invariant)

    sum of weights + sum of runtime reserves + sum of KV budgets <= capacity of the instance

All figures are bytes over all devices of the instance.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from aerostat_core.ids import Bytes
from aerostat_core.quantities import format_size

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


def kv_tokens(budget: Bytes, bytes_per_token: Bytes, page_tokens: int) -> int:
    """Whole pages of tokens that a KV budget holds; 0 when it holds none."""
    return budget // (bytes_per_token * page_tokens) * page_tokens


def memory_price(base: float, used: Bytes, capacity: Bytes) -> float:
    """Mu of design.md section 6: seconds per byte, mu_0 x used / max(slack, 5 % of the capacity)."""
    if capacity <= 0:
        return 0.0
    return base * used / max(capacity - used, MIN_SLACK_SHARE * capacity)
