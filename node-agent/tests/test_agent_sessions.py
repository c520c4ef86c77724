"""Where sessions have their prefixes: bounded, told once, missing at once when an engine ends."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aerostat_agent.engine_events import Finished, Handle
from aerostat_agent.policy.sessions import Row, SessionTable
from aerostat_agent.policy.tracks import EngineKey
from aerostat_core.ids import Epoch, ModelName, NamespacedName, SessionKey

pytestmark = pytest.mark.cpu

A, B = (EngineKey(NamespacedName("default", "cpu-0"), ModelName(m)) for m in ("a", "b"))
HANDLE = Handle(epoch=Epoch(1), prefix_hash=b"h", n_tokens=32)


def turn(session: str, handle: Handle | None = HANDLE) -> Finished:
    return Finished(session=SessionKey(session), handle=handle, n_prompt_tokens=40, n_output_tokens=4, n_cached_tokens=0)


def test_changes_are_handed_out_once() -> None:
    table = SessionTable()
    table.finished(A, turn("s"), 100.0)
    row = Row(A, SessionKey("s"))
    assert table.take_changes() == ((row,), ())
    assert table.take_changes() == ((), ())
    record = table.get(row)
    assert record is not None
    assert (record.handle, record.n_turns, record.last_finished_at) == (HANDLE, 1, 100.0)


def test_an_engine_that_ended_has_no_session_left_on_the_device() -> None:
    table = SessionTable()
    table.finished(A, turn("s"), 100.0)
    table.finished(B, turn("s"), 101.0)
    table.take_changes()
    table.engine_ended(A)
    assert table.take_changes() == ((Row(A, SessionKey("s")),), ())
    on_a, on_b = (table.get(Row(engine, SessionKey("s"))) for engine in (A, B))
    assert on_a is not None
    assert on_b is not None
    assert (on_a.handle, on_b.handle) == (None, HANDLE)


def test_a_hello_replaces_all_that_was_known_of_the_engine() -> None:
    table = SessionTable()
    table.finished(A, turn("gone"), 100.0)
    table.present(A, [(SessionKey("there"), HANDLE)], 101.0)
    gone, there = table.get(Row(A, SessionKey("gone"))), table.get(Row(A, SessionKey("there")))
    assert gone is not None
    assert there is not None
    assert (gone.handle, there.handle) == (None, HANDLE)


def test_the_session_that_was_used_longest_ago_is_forgotten_first_and_that_is_told() -> None:
    table = SessionTable(limit=2)
    for session in ("x", "y", "x", "z"):
        table.finished(A, turn(session), 100.0)
    assert table.get(Row(A, SessionKey("y"))) is None
    rows, forgotten = table.take_changes()
    assert [row.session for row in rows] == ["x", "z"]
    assert forgotten == ("y",)


def test_a_session_that_came_back_before_it_was_told_is_not_told_as_forgotten() -> None:
    table = SessionTable(limit=1)
    for session in ("x", "y", "x"):
        table.finished(A, turn(session), 100.0)
    assert table.take_changes() == ((Row(A, SessionKey("x")),), ("y",))


class Sessions(RuleBasedStateMachine):
    """A follower that applies the changes knows what the table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(limit=4)
        self.follower: dict[Row, Handle | None] = {}

    @rule(engine=st.sampled_from([A, B]), session=st.sampled_from("uvwxyz"), n=st.integers(0, 3))
    def finish(self, engine: EngineKey, session: str, n: int) -> None:
        handle = Handle(epoch=Epoch(1), prefix_hash=bytes([n]), n_tokens=16 * n) if n else None
        self.table.finished(engine, turn(session, handle), 1.0)

    @rule(engine=st.sampled_from([A, B]), sessions=st.lists(st.sampled_from("uvwxyz"), max_size=3))
    def miss(self, engine: EngineKey, sessions: list[str]) -> None:
        self.table.missing(engine, map(SessionKey, sessions))

    @rule(engine=st.sampled_from([A, B]), sessions=st.sets(st.sampled_from("uvwxyz"), max_size=3))
    def hello(self, engine: EngineKey, sessions: set[str]) -> None:
        self.table.present(engine, [(SessionKey(s), HANDLE) for s in sorted(sessions)], 1.0)

    @rule(engine=st.sampled_from([A, B]), session=st.sampled_from("uvwxyz"))
    def lease(self, engine: EngineKey, session: str) -> None:
        self.table.lease_changed(Row(engine, SessionKey(session)))

    @rule(engine=st.sampled_from([A, B]))
    def end(self, engine: EngineKey) -> None:
        self.table.engine_ended(engine)

    @rule()
    def tell(self) -> None:
        rows, forgotten = self.table.take_changes()
        for row in rows:
            record = self.table.get(row)
            assert record is not None
            self.follower[row] = record.handle
        for row in [row for row in self.follower if row.session in forgotten]:
            del self.follower[row]
        there = {row: record.handle for row, record in self.table.rows()}
        assert {row: handle for row, handle in self.follower.items() if row in there} == there

    @invariant()
    def holds_together(self) -> None:
        self.table.check_integrity()


Sessions.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestSessions = Sessions.TestCase
