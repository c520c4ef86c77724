"""One model on one instance: backoff, the end of retries, what resets them."""

import math
from dataclasses import replace

import pytest

from aerostat_agent.policy.memory import Footprint
from aerostat_agent.policy.tracks import MAX_PORT_RETRIES, STABLE_AFTER, Attempts, EngineKey, Failure, Phase, Track
from aerostat_core.defaults import RESTART_DELAYS
from aerostat_core.ids import Epoch, ModelName, NamespacedName

pytestmark = pytest.mark.cpu

KEY = EngineKey(NamespacedName("default", "cpu-0"), ModelName("m"))
HELD = Footprint(weights=3, reserve=2, kv=1)
CRASH = Failure(reason="EngineExited", message="exit code 1")


def started(track: Track, now: float = 0.0, fingerprint: str = "f") -> Track:
    return track.started(epoch=Epoch(1), fingerprint=fingerprint, footprint=HELD, now=now, limit=60.0)


def test_restarts_wait_1_2_4_8_16_seconds_and_the_sixth_failure_is_the_last() -> None:
    track, now = Track(key=KEY), 100.0
    for delay in RESTART_DELAYS:
        track = started(track, now).exited(now, CRASH)
        assert track.attempts.retry_at == now + delay
        now = track.attempts.retry_at
    assert started(track, now).exited(now, CRASH).attempts.is_exhausted


def test_a_failure_after_stable_minutes_counts_as_the_first() -> None:
    track = Track(key=KEY, attempts=Attempts(fingerprint="f", n_failures=5))
    opened = started(track).opened(10.0)
    assert opened.exited(10.0 + STABLE_AFTER - 1, CRASH).attempts.is_exhausted
    assert opened.exited(10.0 + STABLE_AFTER, CRASH).attempts.n_failures == 1


def test_a_permanent_failure_is_not_retried() -> None:
    attempts = started(Track(key=KEY)).exited(1.0, replace(CRASH, is_permanent=True)).attempts
    assert attempts.is_exhausted


def test_a_taken_port_is_retried_at_once_but_not_for_ever() -> None:
    taken = replace(CRASH, is_port_taken=True)
    attempts = Attempts(fingerprint="f")
    for _ in range(MAX_PORT_RETRIES):
        attempts = attempts.failed(taken, 7.0)
        assert (attempts.retry_at, attempts.n_failures) == (7.0, 0)
    assert attempts.failed(taken, 7.0).n_failures == 1


def test_failures_of_another_spec_do_not_count() -> None:
    exhausted = Attempts(fingerprint="old", n_failures=6, retry_at=math.inf, last=CRASH)
    assert exhausted.of("new") == Attempts(fingerprint="new")
    assert exhausted.of("old") is exhausted


def test_an_end_that_was_asked_for_is_no_failure() -> None:
    opened = started(Track(key=KEY)).opened(1.0)
    assert opened.draining(2.0).exited(3.0, CRASH).attempts.last is None  # it went before it was told to
    assert opened.draining(2.0).ending(3.0).exited(4.0, CRASH).attempts.last is None


def test_an_end_for_a_failure_counts_that_failure_and_not_the_exit_code() -> None:
    unhealthy = Failure(reason="EngineUnhealthy", message="out of memory")
    track = started(Track(key=KEY)).opened(1.0).faulted(unhealthy)
    assert track.fault is unhealthy
    assert track.ending(2.0, unhealthy).exited(3.0, CRASH).attempts.last is unhealthy


def test_an_engine_whose_end_is_decided_does_not_open_any_more() -> None:
    ending = started(Track(key=KEY)).ending(1.0)
    assert ending.opened(2.0) is ending
    faulted = started(Track(key=KEY)).faulted(CRASH)
    assert faulted.opened(2.0).phase is Phase.STARTING


def test_an_exit_that_is_told_twice_changes_nothing_the_second_time() -> None:
    gone = started(Track(key=KEY)).exited(1.0, CRASH)
    assert gone.exited(2.0, CRASH) is gone
