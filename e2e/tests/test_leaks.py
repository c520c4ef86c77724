"""The suite's own strictness, tested: a leak that nobody notices is worse than no check."""

import asyncio
import subprocess
import sys

import psutil
import pytest

from aerostat_testing.leaks import LeakError, can_check_tasks, failing_on_leaked_children, failing_on_leaked_tasks

pytestmark = pytest.mark.cpu


async def test_a_task_that_outlives_its_test_is_named() -> None:
    left: list[asyncio.Task[None]] = []

    async def forgetful() -> None:
        async def forgotten() -> None:
            await asyncio.Event().wait()

        left.append(asyncio.create_task(forgotten()))

    with pytest.raises(LeakError, match="forgotten"):
        await failing_on_leaked_tasks(forgetful)()
    left[0].cancel()


async def test_a_task_that_was_cancelled_is_no_leak() -> None:
    async def tidy() -> None:
        asyncio.create_task(asyncio.Event().wait()).cancel()

    await failing_on_leaked_tasks(tidy)()


def test_a_child_that_outlives_its_test_is_named_and_ended() -> None:
    with pytest.raises(LeakError, match="child processes"), failing_on_leaked_children():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not psutil.pid_exists(child.pid)
    child.wait(5)


def test_plain_functions_are_not_wrapped() -> None:
    assert not can_check_tasks(test_plain_functions_are_not_wrapped)
    assert can_check_tasks(test_a_task_that_was_cancelled_is_no_leak)
