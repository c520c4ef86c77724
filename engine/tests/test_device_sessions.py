"""Which sessions count as being on the device: bounded, and missing whenever in doubt."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aerostat_engine.reports import Prefix
from aerostat_engine.sessions import DeviceSessions

pytestmark = pytest.mark.cpu

PAGE = 4
MAX_SESSIONS = 3
MAX_TOKENS = 40


def prefix_of(*tokens: int) -> Prefix:
    return Prefix(tokens=array("q", tokens), page_size=PAGE)


def test_a_session_stays_until_the_cache_gave_some_of_it_up() -> None:
    sessions = DeviceSessions()
    assert sessions.finished("a", prefix_of(1, 2, 3, 4)) == ()
    assert sessions.finished("b", prefix_of(1, 2, 3, 4, 5, 6, 7, 8)) == ()
    assert sessions.check(lambda tokens: 0, at_most=9) == ()
    sessions.evicted()
    assert sessions.check(lambda tokens: 4, at_most=9) == ("b",)
    assert [session for session, _ in sessions.snapshot()] == ["a"]
    assert not sessions.is_in_doubt()


def test_the_longest_finished_are_looked_up_first_and_a_few_at_a_time() -> None:
    sessions = DeviceSessions()
    for name in "abc":
        sessions.finished(name, prefix_of(1, 2, 3, 4))
    sessions.finished("a", prefix_of(1, 2, 3, 4))
    sessions.evicted()
    assert sessions.check(lambda tokens: 0, at_most=2) == ("b", "c")
    assert sessions.is_in_doubt()
    assert sessions.check(lambda tokens: 0, at_most=2) == ("a",)


def test_a_turn_that_left_nothing_makes_its_session_missing() -> None:
    sessions = DeviceSessions()
    sessions.finished("a", prefix_of(1, 2, 3, 4))
    assert sessions.finished("a", prefix_of()) == ("a",)
    assert len(sessions) == 0


class Cache(RuleBasedStateMachine):
    """A cache that evicts as it likes, and an observer who knows only what is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = DeviceSessions(max_sessions=MAX_SESSIONS, max_tokens=MAX_TOKENS)
        self.cached: dict[tuple[int, ...], int] = {}
        self.reported: set[str] = set()
        self.is_settled = True

    @rule(session=st.sampled_from("abcdef"), n_pages=st.integers(0, 12), seed=st.integers(0, 3))
    def finish(self, session: str, n_pages: int, seed: int) -> None:
        tokens = tuple(seed * 100 + i for i in range(n_pages * PAGE))
        self.cached[tokens] = len(tokens)
        self.reported.add(session)
        self.reported -= set(self.sessions.finished(session, prefix_of(*tokens)))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if self.cached:
            tokens = data.draw(st.sampled_from(sorted(self.cached)))
            self.cached[tokens] = data.draw(st.integers(0, len(tokens)))
            self.sessions.evicted()

    @rule(at_most=st.integers(1, 3))
    def check(self, at_most: int) -> None:
        self.reported -= set(self.sessions.check(lambda tokens: self.cached[tuple(tokens)], at_most))

    @invariant()
    def what_is_reported_is_what_is_held_and_whole_once_checked(self) -> None:
        self.sessions.check_integrity()
        held = dict(self.sessions.snapshot())
        assert set(held) == self.reported
        if not self.sessions.is_in_doubt():
            assert all(self.cached[tuple(prefix.tokens)] == len(prefix.tokens) for prefix in held.values())


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=40, deadline=None)
