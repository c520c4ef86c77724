"""Calls that wait, by model, in order of arrival, each with what it waits for; and the tick that looks after them."""

import asyncio
from collections.abc import Callable
from typing import Final

from aerostat_core.ids import NamespacedName, Seconds
from aerostat_router.calls import Call
from aerostat_router.policy.placement import Nothing

TICK: Final[Seconds] = 0.1  # how late a hold budget may end


class HeldCalls:
    """Mutable. `on_tick` is called every TICK while something waits; an idle router has no timer."""

    def __init__(self, on_tick: Callable[[], None]) -> None:
        self._on_tick = on_tick
        self._calls: dict[NamespacedName, dict[Call, Nothing | None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(len(calls) for calls in self._calls.values())

    def __contains__(self, call: Call) -> bool:
        return call in self._calls.get(call.model.name, ())

    def of(self, model: NamespacedName) -> list[Call]:
        return list(self._calls.get(model, ()))

    def models(self) -> list[NamespacedName]:
        return list(self._calls)

    def all(self) -> list[Call]:
        return [call for calls in self._calls.values() for call in calls]

    def why(self, call: Call) -> Nothing | None:
        """None: for a wake."""
        return self._calls.get(call.model.name, {}).get(call)

    def put(self, call: Call, why: Nothing | None) -> None:
        """A call that waits already keeps its place."""
        self._calls.setdefault(call.model.name, {})[call] = why
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def take(self, call: Call) -> bool:
        """False: it was not here."""
        calls = self._calls.get(call.model.name)
        if calls is None or call not in calls:
            return False
        del calls[call]
        if not calls:
            del self._calls[call.model.name]
        if not self._calls and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return True

    def check_integrity(self) -> None:
        if any(not calls for calls in self._calls.values()):
            raise AssertionError("an empty queue of held calls was kept")
        if bool(self._calls) != (self._timer is not None):
            raise AssertionError("the timer runs exactly while calls are held")

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)
        self._on_tick()
