"""Calls that this router has on an engine, and how much of them the engine's last snapshot cannot know yet.

Every call holds a ticket from the moment it is sent until it ends, whichever way; the ticket is the one place where the counters
go down. A call counts beyond the snapshot for two snapshots after it was sent (the first one may have been made before it
arrived); one that ends later than that is counted down until the next snapshot.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from aerostat_core.ids import Seconds
from aerostat_router.policy.views import Load


class EngineLoad(Load):
    """The load of one engine run. A new run starts with a new one; tickets of the old run stay with the old one."""

    __slots__ = ("_before", "_departed", "_now", "_on_change", "generation", "n_in_flight")

    def __init__(self, on_change: Callable[[], None]) -> None:
        super().__init__()
        self.generation = 0
        self.n_in_flight = 0
        self._on_change = on_change
        self._now, self._before = _Sent(), _Sent()  # sent since the last snapshot, and between the two before it
        self._departed = 0

    def enter(self, seconds: Seconds, tokens: int) -> "Ticket":
        self.n_in_flight += 1
        self._now.add(1, seconds, tokens)
        self._count(1, seconds, tokens)
        return Ticket(self, self.generation, seconds, tokens)

    def advance(self) -> None:
        """A new snapshot is here."""
        self.generation += 1
        self._before, self._now = self._now, _Sent()
        self._departed = 0
        self.n_calls = self.tokens = 0
        self.seconds = 0.0
        self._count(self._before.n, self._before.seconds, self._before.tokens)

    def leave(self, ticket: "Ticket") -> None:
        self.n_in_flight -= 1
        age = self.generation - ticket.generation
        if age > 1:
            self._departed += 1
            self._count(-1, 0.0, 0)
        else:
            (self._before if age else self._now).add(-1, -ticket.seconds, -ticket.tokens)
            self._count(-1, -ticket.seconds, -ticket.tokens)

    def check_integrity(self) -> None:
        sent = (self._before, self._now)
        n_sent = self._before.n + self._now.n
        if not 0 <= n_sent <= self.n_in_flight:
            raise AssertionError(f"{n_sent} calls beyond the snapshot, {self.n_in_flight} in flight")
        if any(s.n < 0 or (s.n == 0 and s.tokens) for s in sent):
            raise AssertionError("a call was released twice")
        if self.n_calls != n_sent - self._departed or self.tokens != self._before.tokens + self._now.tokens:
            raise AssertionError(f"{self.n_calls} calls counted, {n_sent} sent and {self._departed} departed")

    def _count(self, n: int, seconds: Seconds, tokens: int) -> None:
        self.n_calls += n
        self.seconds = max(0.0, self.seconds + seconds)  # sums of floats do not go back to 0
        self.tokens += tokens
        self._on_change()


class _Sent:
    __slots__ = ("n", "seconds", "tokens")

    def __init__(self) -> None:
        self.n = 0
        self.seconds: Seconds = 0.0
        self.tokens = 0

    def add(self, n: int, seconds: Seconds, tokens: int) -> None:
        self.n += n
        self.seconds += seconds
        self.tokens += tokens


class Ticket:
    """A context manager; `close` does the same for code that lives in callbacks. Closing twice is closing once."""

    __slots__ = ("_load", "generation", "seconds", "tokens")

    def __init__(self, load: EngineLoad, generation: int, seconds: Seconds, tokens: int) -> None:
        self._load: EngineLoad | None = load
        self.generation = generation
        self.seconds = seconds
        self.tokens = tokens

    def close(self) -> None:
        load, self._load = self._load, None
        if load is not None:
            load.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
