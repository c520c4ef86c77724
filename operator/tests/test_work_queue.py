"""A burst of changes is one run; retries and resyncs come when they are due. In virtual time."""

import asyncio

import pytest

from aerostat_core.ids import NamespacedName
from aerostat_operator.work_queue import COALESCE, WorkQueue
from aerostat_runtime.cluster.port import Kind

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]


class LoopClock:
    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return self.monotonic()


def key(name: str) -> tuple[Kind, NamespacedName]:
    return Kind.MODEL, NamespacedName("default", name)


def elapsed() -> float:
    return asyncio.get_running_loop().time()


async def test_a_burst_is_taken_together() -> None:
    queue = WorkQueue(LoopClock())
    for name in ("a", "b", "a"):
        queue.add(key(name))
    begun = elapsed()
    assert await queue.take() == frozenset({key("a"), key("b")})
    assert elapsed() - begun == pytest.approx(COALESCE)


async def test_what_comes_during_a_run_is_taken_next() -> None:
    queue = WorkQueue(LoopClock())
    queue.add(key("a"))
    await queue.take()
    queue.add(key("b"))
    assert await queue.take() == frozenset({key("b")})


async def test_the_earliest_due_time_wakes_without_a_key() -> None:
    queue = WorkQueue(LoopClock())
    begun = elapsed()
    queue.wake_in(30.0)
    queue.wake_in(2.0)
    assert await queue.take() == frozenset()
    assert elapsed() - begun == pytest.approx(2.0)


async def test_a_due_time_asked_for_while_waiting_counts() -> None:
    queue = WorkQueue(LoopClock())
    begun = elapsed()
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(1.0)
    queue.wake_in(1.0)
    assert await waiting == frozenset()
    assert elapsed() - begun == pytest.approx(2.0)


async def test_closing_tells_whoever_waits() -> None:
    queue = WorkQueue(LoopClock())
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add(key("a"))
    queue.close()
    assert await waiting is None
    assert await queue.take() is None
