"""Where this node's agent, as a model's wake owner, has settled that the model is opened (contracts: the first proposal wins).

A settlement stands while routers ask for it, wherever it points: they ask again each second as long as a call waits. It ends when
nobody asks any more, or with the first router that knows its place to be no answer.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from aerostat_core.ids import InstanceName, NamespacedName, Seconds

LASTS: Final[Seconds] = 3.0  # after the last router asked
MAX_SETTLEMENTS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAsked:
    """`ruled_out`: instances that answer no need, since the model is open there or was refused there."""

    model: NamespacedName
    proposed: InstanceName
    is_settled: bool = False
    ruled_out: frozenset[InstanceName] = frozenset()


@dataclass(frozen=True, slots=True)
class _Settlement:
    place: InstanceName
    asked_at: Seconds


class Settlements:
    """Mutable."""

    def __init__(self) -> None:
        self._places: dict[NamespacedName, _Settlement] = {}  # the model asked for last is the last

    def __len__(self) -> int:
        return len(self._places)

    def of(self, model: NamespacedName, *, ruled_out: Collection[InstanceName], now: Seconds) -> InstanceName | None:
        """What stands for a router that asks now; None: its proposal wins."""
        known = self._places.get(model)
        if known is None or known.asked_at + LASTS <= now or known.place in ruled_out:
            return None
        return known.place

    def settle(self, model: NamespacedName, place: InstanceName, *, now: Seconds) -> None:
        """Also renews what stands."""
        self._places.pop(model, None)
        self._places[model] = _Settlement(place, now)
        for oldest in list(self._places):
            if len(self._places) <= MAX_SETTLEMENTS and self._places[oldest].asked_at + LASTS > now:
                break
            del self._places[oldest]

    def void(self, model: NamespacedName) -> None:
        """It is refused there."""
        self._places.pop(model, None)

    def check_integrity(self) -> None:
        """Raises AssertionError. Run after every step of a property test."""
        assert len(self._places) <= MAX_SETTLEMENTS
        asked = [s.asked_at for s in self._places.values()]
        assert asked == sorted(asked)
