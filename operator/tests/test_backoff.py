"""When a failed write is tried again, by kind of failure."""

import pytest

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName
from aerostat_operator.backoff import FIRST_DELAY, LONGEST_DELAY, Backoff
from aerostat_operator.writes import Verb, Write
from aerostat_runtime.cluster.port import Kind

pytestmark = pytest.mark.cpu


def write(content: str = "x") -> Write:
    return Write(verb=Verb.STATUS, kind=Kind.MODEL, name=NamespacedName("default", "m"), resource={"state": content})


def test_unexpected_failures_double_their_wait_up_to_the_longest() -> None:
    backoff = Backoff()
    delays = [backoff.failed(write(), RuntimeError(), 0.0) for _ in range(12)]
    assert delays[:3] == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
    assert delays[-1] == LONGEST_DELAY


def test_a_temporary_failure_waits_as_long_as_it_says() -> None:
    backoff = Backoff()
    assert backoff.failed(write(), TemporaryError("Busy", "busy", retry_after=7.0), 100.0) == 7.0
    assert not backoff.is_due(write(), 106.9)
    assert backoff.remaining(write(), 105.0) == 2.0
    assert backoff.is_due(write(), 107.0)


def test_a_permanent_failure_waits_long_but_other_content_is_tried_at_once() -> None:
    backoff = Backoff()
    assert backoff.failed(write(), PermanentError("Invalid", "no"), 0.0) == LONGEST_DELAY
    assert not backoff.is_due(write(), LONGEST_DELAY - 1)
    assert backoff.is_due(write("y"), 0.0)
    assert backoff.failed(write("y"), RuntimeError(), 0.0) == FIRST_DELAY


def test_success_and_disuse_forget_the_failure() -> None:
    backoff = Backoff()
    backoff.failed(write(), RuntimeError(), 0.0)
    backoff.succeeded(write())
    assert backoff.is_due(write(), 0.0)
    backoff.failed(write(), RuntimeError(), 0.0)
    backoff.keep_only([])
    assert backoff.is_due(write(), 0.0)
