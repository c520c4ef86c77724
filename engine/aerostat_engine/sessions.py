"""Which sessions have their prefix on the device: bounded, checked against the prefix cache after evictions, in doubt missing. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from aerostat_engine.reports import Prefix, Tokens

MatchedTokens = Callable[["Tokens[int]"], int]
"""How many leading tokens the prefix cache holds on the device; must not change the cache."""


class DeviceSessions:
    """Sessions in the order of their last turn, each with the prefix that it left.

    After an eviction every session is looked up again, those that finished longest ago first, since the cache evicts in about that order;
    a few at a time, so that a batch boundary stays short.
    """

    def __init__(self, *, max_sessions: int = 4096, max_tokens: int = 4 << 20) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._held: OrderedDict[str, Prefix] = OrderedDict()
        self._n_tokens = 0
        self._unchecked: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def snapshot(self) -> list[tuple[str, Prefix]]:
        """A copy; safe to ask for from another thread."""
        return list(self._held.items())

    def finished(self, session: str, prefix: Prefix) -> tuple[str, ...]:
        """A turn left `prefix` on the device. Returns the sessions that are forgotten for it, which then count as missing."""
        self._drop(session)
        if not prefix.tokens or len(prefix.tokens) > self._max_tokens:
            return (session,)
        self._held[session] = prefix
        self._n_tokens += len(prefix.tokens)
        return tuple(self._overflow())

    def evicted(self) -> None:
        """The cache gave something up: any session may be concerned."""
        self._unchecked = OrderedDict.fromkeys(self._held)

    def is_in_doubt(self) -> bool:
        return bool(self._unchecked)

    def check(self, matched: MatchedTokens, at_most: int) -> tuple[str, ...]:
        """Look up at most `at_most` sessions that are in doubt; those that are not whole any more are forgotten and returned."""
        gone = []
        for _ in range(min(at_most, len(self._unchecked))):
            session, _ = self._unchecked.popitem(last=False)
            prefix = self._held[session]
            if matched(prefix.tokens) < len(prefix.tokens):
                self._drop(session)
                gone.append(session)
        return tuple(gone)

    def check_integrity(self) -> None:
        assert self._n_tokens == sum(len(prefix.tokens) for prefix in self._held.values()) <= self._max_tokens
        assert len(self._held) <= self._max_sessions
        assert self._unchecked.keys() <= self._held.keys()

    def _overflow(self) -> Iterator[str]:
        while len(self._held) > self._max_sessions or self._n_tokens > self._max_tokens:
            session = next(iter(self._held))
            self._drop(session)
            yield session

    def _drop(self, session: str) -> None:
        prefix = self._held.pop(session, None)
        if prefix is not None:
            self._n_tokens -= len(prefix.tokens)
        self._unchecked.pop(session, None)
