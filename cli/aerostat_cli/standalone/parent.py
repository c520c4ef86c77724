"""`aerostat up` from its start to its end, and the order in which all stops.

Routers drain first, while their engines still run; then the agent; the keeper last, which ends the engines. The first
SIGINT or SIGTERM starts that, the second one kills what is left.
"""

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aerostat_cli.standalone import settings as command_lines
from aerostat_cli.standalone.children import Child, Family
from aerostat_cli.standalone.loops import announce, follow_manifests, tell_progress
from aerostat_cli.standalone.node import node_resource, shortages
from aerostat_cli.standalone.run_state import fresh_run_folder
from aerostat_cli.standalone.settings import NODE, UpSettings
from aerostat_cli.standalone.voice import Voice
from aerostat_operator.loop import OperatorSettings, run_operator
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster.folder import FolderCluster
from aerostat_runtime.cluster.store import naming_remedies
from aerostat_runtime.logs import set_up_logs
from aerostat_runtime.process import adopt_orphans

FAILED: Final = 1


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP, counted: the first asks for an orderly end, the second one forces it."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signum, self._received)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def serve(settings: UpSettings) -> int:
    """Until a signal, or until a loop of ours fails. Returns the exit code. The caller holds the lock of the state folder."""
    with naming_remedies(settings.state):
        _begin_logs(settings.logs)
        set_up_logs(file=settings.logs / "operator.log")
    voice, interrupts = Voice(), Interrupts()
    adopt_orphans()
    for shortage in shortages(settings.model_cache):
        voice.warn(f"warning: {shortage}")
    with fresh_run_folder(settings.state) as run_folder:
        cluster = FolderCluster(settings.state)
        try:
            await cluster.put(node_resource(NODE))
            return await _serve(settings, run_folder, cluster, voice, interrupts)
        finally:
            await cluster.close()


def _begin_logs(logs: Path) -> None:
    """An empty folder; the last run's logs are kept beside it, older ones are not."""
    previous = logs.with_name("logs.previous")
    if logs.exists():
        shutil.rmtree(previous, ignore_errors=True)
        logs.rename(previous)
    logs.mkdir(mode=0o700)


async def _serve(settings: UpSettings, run_folder: Path, cluster: FolderCluster, voice: Voice, interrupts: Interrupts) -> int:
    family, pid = Family(voice.warn), os.getpid()
    keeper = family.add(command_lines.keeper_spec(settings, run_folder, pid))
    agent = family.add(command_lines.agent_spec(settings, run_folder, pid))
    routers = [family.add(command_lines.router_spec(settings, i, pid)) for i in range(len(settings.routers))]
    children = [asyncio.create_task(child.run(), name=child.spec.name) for child in (keeper, agent, *routers)]
    loops = [
        asyncio.create_task(follow_manifests(settings, cluster, voice), name="manifests"),
        asyncio.create_task(_operate(settings, cluster, interrupts), name="operator"),
        asyncio.create_task(tell_progress(settings, cluster, voice), name="progress"),
        asyncio.create_task(announce(settings, run_folder, routers, voice), name="announcement"),
    ]
    try:
        return await _until_interrupted([*loops, *children], voice, interrupts)
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await _stop(family, ((*routers,), (agent,), (keeper,)), interrupts)
        await asyncio.gather(*children, return_exceptions=True)
        voice.say("stopped")


async def _operate(settings: UpSettings, cluster: FolderCluster, interrupts: Interrupts) -> None:
    operator = OperatorSettings(url=f"http://{settings.routers[0].http}")
    await run_operator(cluster, SystemClock(), stop=interrupts.first, settings=operator)


async def _until_interrupted(tasks: Sequence[asyncio.Task[None]], voice: Voice, interrupts: Interrupts) -> int:
    """0 after a signal. A task that ends is done with its work; one that fails ends everything, and the user reads why."""
    interrupted = asyncio.create_task(interrupts.first.wait(), name="signals")
    pending: set[asyncio.Task[None] | asyncio.Task[bool]] = {*tasks, interrupted}
    try:
        while interrupted in pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    logging.getLogger(__name__).error("the %s failed", task.get_name(), exc_info=error)
                    voice.fail(f"{task.get_name()}: {_reason(error)}")
                    return FAILED
        voice.say("stopping; answers that are under way are finished first. Ctrl-C again ends it at once")
        return 0
    finally:
        interrupted.cancel()


async def _stop(family: Family, stages: Sequence[Sequence[Child]], interrupts: Interrupts) -> None:
    """Bounded by the children's graces. A second signal cuts them short."""
    orderly = asyncio.create_task(family.stop(*stages))
    forced = asyncio.create_task(interrupts.second.wait())
    try:
        await asyncio.wait({orderly, forced}, return_when=asyncio.FIRST_COMPLETED)
        if not orderly.done():
            family.kill()
        await orderly
    finally:
        forced.cancel()


def _reason(error: BaseException) -> str:
    """The first cause, in one line: groups of errors come from task groups, and say nothing by themselves."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
