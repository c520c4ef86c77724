"""What all routers saw of each model: the latest report of each, summed. A router that fell silent counts no more."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from aerostat_core.ids import NamespacedName, Seconds

_FORGET_AFTER_WINDOWS: Final = 2
MAX_ROUTERS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Calls of one model in a window."""

    model: NamespacedName
    arrivals: int = 0
    held: int = 0
    spilled: int = 0


class DemandTable:
    """Mutable."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[Seconds, tuple[Demand, ...]]] = {}  # router -> (valid until, its demand)

    def report(self, router: str, demand: Iterable[Demand], *, window: Seconds, now: Seconds) -> bool:
        """Replaces what the router said before. False: there are too many routers, this one is not counted."""
        self._drop_silent(now)
        if router not in self._reports and len(self._reports) >= MAX_ROUTERS:
            return False
        self._reports[router] = (now + _FORGET_AFTER_WINDOWS * window, tuple(demand))
        return True

    def sums(self, now: Seconds) -> tuple[Demand, ...]:
        """By model, in order of name."""
        self._drop_silent(now)
        totals: dict[NamespacedName, Demand] = {}
        for _, demand in self._reports.values():
            for d in demand:
                t = totals.get(d.model, Demand(model=d.model))
                totals[d.model] = Demand(
                    model=d.model, arrivals=t.arrivals + d.arrivals, held=t.held + d.held, spilled=t.spilled + d.spilled
                )
        return tuple(totals[model] for model in sorted(totals))

    def _drop_silent(self, now: Seconds) -> None:
        for router in [router for router, (until, _) in self._reports.items() if until <= now]:
            del self._reports[router]
