"""Calls that this router has on an engine, and how much of them the engine's last snapshot cannot know yet.

Every call holds a ticket from the moment it is sent until it ends, whichever way; the ticket is the one place where the counters
go down. A call counts beyond the snapshot for two snapshots after it was sent (the first one may have been made before it
arrived); one that ends later than that is counted down until the next snapshot.
"""

from types import TracebackType
from typing import Self

from aerostat_core.ids import Seconds
from aerostat_router.policy.views import Load


class EngineLoad(Load):
    """The load of one engine run. A new run starts with a new one; tickets of the old run stay with the old one."""

    __slots__ = ("_departed", "_open", "generation", "n_in_flight")

    def __init__(self) -> None:
        super().__init__()
        self.generation = 0
        self.n_in_flight = 0
        self._open: dict[int, _Sent] = {}  # by generation, the last two
        self._departed = 0

    def enter(self, seconds: Seconds, tokens: int) -> "Ticket":
        sent = self._open.get(self.generation)
        if sent is None:
            sent = self._open[self.generation] = _Sent()
        sent.add(1, seconds, tokens)
        self.n_in_flight += 1
        self._sum()
        return Ticket(self, self.generation, seconds, tokens)

    def advance(self) -> None:
        """A new snapshot is here."""
        self.generation += 1
        self._open.pop(self.generation - 2, None)
        self._departed = 0
        self._sum()

    def leave(self, ticket: "Ticket") -> None:
        self.n_in_flight -= 1
        sent = self._open.get(ticket.generation)
        if sent is None:
            self._departed += 1
        else:
            sent.add(-1, -ticket.seconds, -ticket.tokens)
        self._sum()

    def check_integrity(self) -> None:
        n_open = sum(sent.n for sent in self._open.values())
        if not 0 <= n_open <= self.n_in_flight:
            raise AssertionError(f"{n_open} calls beyond the snapshot, {self.n_in_flight} in flight")
        if any(sent.n < 0 or (sent.n == 0 and sent.tokens) for sent in self._open.values()):
            raise AssertionError("a call was released twice")
        if self.n_calls != n_open - self._departed:
            raise AssertionError(f"{self.n_calls} calls counted, {n_open} open and {self._departed} departed")

    def _sum(self) -> None:
        n, seconds, tokens = -self._departed, 0.0, 0
        for sent in self._open.values():
            n += sent.n
            seconds += sent.seconds
            tokens += sent.tokens
        self.n_calls, self.seconds, self.tokens = n, max(0.0, seconds), tokens


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
