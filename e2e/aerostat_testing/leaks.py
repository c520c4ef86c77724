"""A test that leaves a task or a child process behind fails, and names what it left."""

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import psutil

from aerostat_core.ids import Seconds

# What was cancelled may need this long by a real clock, since threads of libraries have a part in it.
_TASK_GRACE: Final[Seconds] = 1.0
# A child that was told to end may need this long.
_CHILD_GRACE: Final[Seconds] = 3.0
# A server that a whole run shares has this variable in its environment.
OUTLIVES_TESTS: Final = "AEROSTAT_OUTLIVES_TESTS"
# The standard library's own helper process, which lives as long as the interpreter.
_INTERPRETERS_OWN: Final = "multiprocessing.resource_tracker"


class LeakError(AssertionError):
    """Something outlived the test that started it."""


def failing_on_leaked_tasks(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The same test, which fails when tasks that it started still run after it."""

    @functools.wraps(test)
    async def checked(*args: object, **kwargs: object) -> None:
        before = asyncio.all_tasks()
        await test(*args, **kwargs)
        deadline = time.monotonic() + _TASK_GRACE
        while left := asyncio.all_tasks() - before:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0)
        else:
            return
        raise LeakError("tasks still run after the test: " + ", ".join(sorted(str(task.get_coro()) for task in left)))

    return checked


def can_check_tasks(test: object) -> bool:
    """Coroutine functions; hypothesis wraps them in its own way and is left alone."""
    return inspect.iscoroutinefunction(test) and not hasattr(test, "hypothesis")


@contextmanager
def failing_on_leaked_children() -> Iterator[None]:
    before = set(_children())
    yield
    _, left = psutil.wait_procs([p for p in _children() if p not in before], timeout=_CHILD_GRACE)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=_CHILD_GRACE)
    if left:
        raise LeakError("child processes still run after the test: " + ", ".join(map(str, left)))


def _children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if not _outlives_tests(p)]


def _outlives_tests(process: psutil.Process) -> bool:
    try:
        return OUTLIVES_TESTS in process.environ() or any(_INTERPRETERS_OWN in word for word in process.cmdline())
    except psutil.Error:
        return False
