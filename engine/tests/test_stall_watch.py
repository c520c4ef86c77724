"""A batch that never ends is trouble; an idle scheduler, and one whose batches end, are not."""

import pytest

from aerostat_engine.stall_watch import StallWatch

pytestmark = pytest.mark.cpu


def test_a_batch_that_runs_too_long_is_trouble_until_it_ends() -> None:
    watch = StallWatch(limit=150.0)
    assert watch.trouble(1e9) is None
    watch.began(3, 10.0)
    assert watch.trouble(159.9) is None
    assert watch.trouble(161.0) == "a batch of 3 requests has run for 151 s, 150 s are allowed: the scheduler hangs"
    watch.ended()
    assert watch.trouble(1e9) is None


def test_each_batch_has_its_own_time() -> None:
    watch = StallWatch(limit=150.0)
    for second in range(0, 1000, 100):
        watch.began(1, float(second))
        assert watch.trouble(second + 100.0) is None
