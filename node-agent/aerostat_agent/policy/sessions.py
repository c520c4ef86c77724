"""Which sessions have their prefix on which engine. Bounded: the one that was used longest ago is forgotten first.

Routers are told changes only; `take_changes` hands them out once. A row of an engine that ended is missing at once.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from aerostat_agent.engine_events import Finished, Handle
from aerostat_agent.policy.tracks import EngineKey
from aerostat_core.ids import Seconds, SessionKey

MAX_SESSIONS: Final = 8192


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """A session may talk to several models, so it is known once per engine."""

    engine: EngineKey
    session: SessionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """`handle` is None once the prefix is missing. `last_finished_at` is wall clock.

    `is_reported` is false from a lease for a turn that the engine has not reported yet until its next word: it has just served
    the session, so nobody may take the prefix for missing.
    """

    handle: Handle | None
    is_reported: bool = True
    n_turns: int = 0
    last_finished_at: Seconds = 0.0


class SessionTable:
    """Mutable."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._rows: OrderedDict[Row, SessionRecord] = OrderedDict()
        self._n_of: dict[SessionKey, int] = {}
        self._changed: set[Row] = set()
        self._forgotten: set[SessionKey] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, row: Row) -> SessionRecord | None:
        return self._rows.get(row)

    def rows(self) -> Iterable[tuple[Row, SessionRecord]]:
        return self._rows.items()

    def finished(self, engine: EngineKey, turn: Finished, wall: Seconds) -> None:
        """A turn of the session ended on this engine."""
        row = Row(engine, turn.session)
        old = self._rows.get(row)
        handle = turn.handle if turn.handle is not None else old.handle if old is not None else None
        self._put(row, SessionRecord(handle=handle, n_turns=(old.n_turns if old is not None else 0) + 1, last_finished_at=wall))

    def present(self, engine: EngineKey, sessions: Iterable[tuple[SessionKey, Handle]], wall: Seconds) -> None:
        """What an engine says at hello: all that it has, and nothing else of it is there."""
        there = dict(sessions)
        self.missing(engine, [row.session for row in self._rows if row.engine == engine and row.session not in there])
        for session, handle in there.items():
            old = self._rows.get(Row(engine, session), SessionRecord(handle=None, last_finished_at=wall))
            self._put(Row(engine, session), replace(old, handle=handle, is_reported=True))

    def missing(self, engine: EngineKey, sessions: Iterable[SessionKey]) -> None:
        """Their prefixes left the engine."""
        for session in sessions:
            row = Row(engine, session)
            if (old := self._rows.get(row)) is not None and (old.handle is not None or not old.is_reported):
                self._rows[row] = replace(old, handle=None, is_reported=True)
                self._changed.add(row)

    def engine_ended(self, engine: EngineKey) -> None:
        self.missing(engine, [row.session for row in self._rows if row.engine == engine])

    def leased(self, row: Row) -> None:
        """A router saw a turn of it end here. Routers are often faster to tell than engines: its row may begin with this."""
        old = self._rows.get(row, SessionRecord(handle=None))
        self._put(row, replace(old, is_reported=old.handle is not None))

    def lease_changed(self, row: Row) -> None:
        """Its lease is another one now, or none."""
        if row in self._rows:
            self._changed.add(row)

    def take_changes(self) -> tuple[tuple[Row, ...], tuple[SessionKey, ...]]:
        """Rows that changed and sessions that no row is left of, since the last call."""
        rows = tuple(sorted(row for row in self._changed if row in self._rows))
        forgotten = tuple(sorted(s for s in self._forgotten if s not in self._n_of))
        self._changed.clear()
        self._forgotten.clear()
        return rows, forgotten

    def _put(self, row: Row, record: SessionRecord) -> None:
        if row not in self._rows:
            self._n_of[row.session] = self._n_of.get(row.session, 0) + 1
        self._rows[row] = record
        self._rows.move_to_end(row)
        self._changed.add(row)
        while len(self._rows) > self._limit:
            oldest, _ = self._rows.popitem(last=False)
            self._changed.discard(oldest)
            self._n_of[oldest.session] -= 1
            if not self._n_of[oldest.session]:
                del self._n_of[oldest.session]
                self._forgotten.add(oldest.session)

    def check_integrity(self) -> None:
        """Raises AssertionError. Run after every step of a property test."""
        assert len(self._rows) <= self._limit
        assert sum(self._n_of.values()) == len(self._rows)
        assert set(self._n_of) == {row.session for row in self._rows}
        assert self._changed <= set(self._rows)
