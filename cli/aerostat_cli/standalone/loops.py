"""What the parent of `aerostat up` does besides supervising: follow the manifests, run the operator, tell the user."""

import asyncio
import os
from pathlib import Path
from typing import Final

from aerostat_cli.standalone.children import Child
from aerostat_cli.standalone.progress import ProgressTeller
from aerostat_cli.standalone.run_state import Run
from aerostat_cli.standalone.settings import UpSettings
from aerostat_cli.standalone.voice import Voice
from aerostat_core.errors import PermanentError
from aerostat_core.ids import Seconds
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster.folder import FolderCluster
from aerostat_runtime.cluster.manifests import ManifestFolder, Rejection, SyncReport
from aerostat_runtime.cluster.port import Kind

LISTEN_LIMIT: Final[Seconds] = 60.0
_LISTEN_POLL: Final[Seconds] = 0.1
_LOOK_AGAIN: Final[Seconds] = 1.0  # progress inside a step comes with no event of its own


async def follow_manifests(settings: UpSettings, cluster: FolderCluster, voice: Voice) -> None:
    """Apply the folder to the cluster, again after each edit."""
    rejected: frozenset[Rejection] = frozenset()
    async for report in ManifestFolder(settings.manifests, cluster).watch():
        for rejection in sorted(set(report.rejected) - rejected, key=str):
            voice.warn(f"rejected {rejection}")
        if rejected and not report.rejected:
            voice.say("all manifests are in force")
        rejected = frozenset(report.rejected)
        if report == SyncReport() and not await cluster.list(Kind.MODEL):
            voice.say(f"no model is declared in {settings.manifests} yet; put manifests there (*.yaml), they are followed")


async def tell_progress(settings: UpSettings, cluster: FolderCluster, voice: Voice) -> None:
    """One line for each step of each model."""
    teller = ProgressTeller(f"http://{settings.routers[0].http}")
    clock, changed = SystemClock(), asyncio.Event()
    watches = [asyncio.create_task(_signal_changes(cluster, kind, changed)) for kind in (Kind.MODEL, Kind.INSTANCE)]
    try:
        while True:
            await changed.wait()
            changed.clear()
            for line in teller.lines(await cluster.list(Kind.MODEL), await cluster.list(Kind.INSTANCE), now=clock.monotonic()):
                voice.say(line)
            await asyncio.sleep(_LOOK_AGAIN)
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _signal_changes(cluster: FolderCluster, kind: Kind, changed: asyncio.Event) -> None:
    async for _ in cluster.watch(kind):
        changed.set()


async def announce(settings: UpSettings, run_folder: Path, routers: list[Child], voice: Voice) -> None:
    """Say where the routers listen, once all do, and let the other commands find them. Raises PermanentError."""
    for child, addresses in zip(routers, settings.routers, strict=True):
        for address in (addresses.http, addresses.grpc, addresses.admin):
            await _listening(address, child)
    run = Run(
        pid=os.getpid(),
        manifests=str(settings.manifests),
        state=str(settings.state),
        started_at=SystemClock().wall(),
        routers=settings.routers,
    )
    run.write(run_folder)
    for addresses in settings.routers:
        voice.say(f"listening: http://{addresses.http}/v1 (OpenAI and Anthropic), gRPC {addresses.grpc}, admin http://{addresses.admin}")
    voice.say(f"logs: {settings.logs}; Ctrl-C stops everything")


async def _listening(address: str, child: Child) -> None:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LISTEN_LIMIT):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                except OSError:
                    await asyncio.sleep(_LISTEN_POLL)
                else:
                    writer.close()
                    return
    except TimeoutError as error:
        message = f"{child.spec.name} does not listen at {address} after {LISTEN_LIMIT:g} s; its log: {child.spec.log}"
        raise PermanentError("NotListening", message) from error
