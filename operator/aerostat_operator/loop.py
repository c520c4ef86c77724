"""The operator's life: watches feed a mirror and a queue, one worker reconciles, until it is told to stop.

`aerostat up` runs it in its own process. In a cluster kopf's handlers feed the same mirror and queue, and `work` runs in
the replica that holds the lease (`replica`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from aerostat_core.clock import Clock
from aerostat_core.defaults import STATUS_FIGURES_EVERY
from aerostat_core.ids import Seconds
from aerostat_operator.mirror import Mirror
from aerostat_operator.reconcile import Outcome, Reconciler
from aerostat_operator.work_queue import WorkQueue
from aerostat_runtime.cluster.port import Cluster, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """`url` goes to Model.status.url. `resync`: heartbeats age and starts get stuck without an event, so look that often."""

    url: str = ""
    resync: Seconds = STATUS_FIGURES_EVERY


async def run_operator(cluster: Cluster, clock: Clock, *, stop: asyncio.Event, settings: OperatorSettings) -> None:
    """Runs until `stop` is set; the run under way is finished. Raises what a watch raises: without one it would act blindly."""
    mirror, queue = Mirror(), WorkQueue(clock)
    reconciler = Reconciler(cluster, clock, mirror, url=settings.url)
    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(_watch(cluster, kind, mirror, queue), name=f"watch {kind}") for kind in Kind]
        stopper = tasks.create_task(_close_on(stop, queue), name="stop operator")
        await work(reconciler, mirror, queue, resync=settings.resync)
        for task in (*watches, stopper):
            task.cancel()


def _unobserved(outcome: Outcome) -> None:
    """Where nobody counts."""


async def work(
    reconciler: Reconciler,
    mirror: Mirror,
    queue: WorkQueue,
    *,
    resync: Seconds,
    settle: Callable[[Outcome], None] = _unobserved,
) -> None:
    """Reconciles until the queue is closed; the run under way is finished. `settle` is told what each run came to."""
    queue.wake_in(resync)
    while (changed := await queue.take()) is not None:
        if not mirror.is_synced:
            continue  # what is not here yet might exist: nothing may be concluded from that
        if not changed:
            mirror.forget_own_statuses()
        outcome = await reconciler.reconcile()
        settle(outcome)
        queue.wake_in(resync if outcome.retry is None else min(outcome.retry, resync))


async def _watch(cluster: Cluster, kind: Kind, mirror: Mirror, queue: WorkQueue) -> None:
    async for event in cluster.watch(kind):
        if (key := mirror.observe(event)) is not None:
            queue.add(key)
        elif event.resource is None:
            queue.wake_in(0.0)


async def _close_on(stop: asyncio.Event, queue: WorkQueue) -> None:
    await stop.wait()
    queue.close()
