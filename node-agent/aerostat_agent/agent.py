"""One agent from Attach until its keeper's link is lost or it is told to stop. Engines are left as they are, whatever the end.

Nothing here is kept across links: attaching anew is the same as starting anew.
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Final

import aiohttp

from aerostat_agent import admin, telemetry
from aerostat_agent.engine_link import EngineLinks
from aerostat_agent.epochs import EpochSource
from aerostat_agent.keeper_client import KeeperLink
from aerostat_agent.metrics import registry_of
from aerostat_agent.model_cache import Needs, NodeCache
from aerostat_agent.node import Node
from aerostat_agent.probe import HttpProber
from aerostat_agent.publisher import Publisher
from aerostat_agent.reconcile import follow_instances
from aerostat_agent.reports import EngineReports
from aerostat_agent.settings import Settings
from aerostat_agent.status import StatusWriter
from aerostat_agent.supervisor import Supervisor
from aerostat_agent.unix_socket import listen
from aerostat_agent.weights import Weights
from aerostat_core.clock import Clock
from aerostat_core.errors import AerostatError, SettingError, TemporaryError
from aerostat_core.ids import Epoch, Seconds
from aerostat_runtime.cluster.port import Cluster, Kind, Secrets
from aerostat_runtime.tls import TlsFolder

_log = logging.getLogger(__name__)

_REATTACH_AFTER: Final[Seconds] = 0.5


async def serve(
    settings: Settings,
    tls: TlsFolder | None,
    cluster: Cluster,
    secrets: Secrets,
    link: KeeperLink,
    clock: Clock,
    stop: asyncio.Event,
) -> None:
    """Returns when told to stop; raises TemporaryError when the keeper's link is lost, FencedError when a newer
    agent commands, SettingError for an address in use, or TLS at one end only."""
    if (tls is None) != (link.site.tls_dir is None):
        raise SettingError("the agent and the keeper must both be given --tls-dir, or neither: engines serve by the keeper's")
    processes = await link.list()
    new_epoch = EpochSource(clock, max((p.epoch for p in processes), default=Epoch(0)))
    node = Node(settings.node, link.agent_epoch, clock, memory=await link.memory())
    cache = NodeCache(
        settings.model_cache, settings.model_cache_limit, needs=lambda: needs_of(node, weights), evicts=lambda at: weights.forget(at)
    )
    weights = Weights(
        link,
        clock,
        command=settings.preparer,
        cache=cache,
        log_dir=settings.log_dir,
        new_epoch=new_epoch,
        secrets=secrets,
        changed=node.touch,
    )
    synced = asyncio.Event()
    async with aiohttp.ClientSession() as http:
        reports = EngineReports(node, HttpProber(http, tls))
        links = EngineLinks(reports, link.agent_epoch)
        supervisor = Supervisor(settings, node, link, weights=weights, links=links, new_epoch=new_epoch)
        listener = listen(settings.agent_socket, takes_over=True)  # the keeper has fenced whoever served there
        try:
            await supervisor.adopt(processes)
            async with aclosing(cluster.watch(Kind.INSTANCE)) as events:  # type: ignore[type-var]  # watches are generators
                await _until(
                    stop,
                    link,
                    follow_instances(events, node, synced),
                    links.serve(listener.sock),
                    supervisor.follow_exits(link.exits),
                    _run_synced(settings, tls, node, cluster, supervisor, cache, synced),
                )
        finally:
            await weights.close()
            await reports.close()
            listener.close()


def needs_of(node: Node, weights: Weights) -> Needs:
    """Models that an Instance allows, whether they run or not; what is being prepared; what engines serve, if of an earlier declaration."""
    sources = {(model.source_uri, model.trust_remote_code) for spec in node.specs.values() for model in spec.models}
    sources |= {(source.uri, source.trust_remote_code) for source in weights.under_way}
    return Needs(sources=frozenset(sources), folders=frozenset(Path(engine.note.prepared.path) for engine in node.engines.values()))


async def _run_synced(
    settings: Settings,
    tls: TlsFolder | None,
    node: Node,
    cluster: Cluster,
    supervisor: Supervisor,
    cache: NodeCache,
    synced: asyncio.Event,
) -> None:
    """Decide, publish, write status and evict once all Instances are known."""
    publisher = Publisher(node)
    async with admin.serving(settings.admin_listen, registry_of(node, publisher, cache), synced.is_set) as admin_address:
        await synced.wait()
        await supervisor.step()
        server, address = await telemetry.serve(telemetry.TelemetryService(node, publisher), settings.telemetry_listen, tls)
        _log.info("agent epoch %d: telemetry on %s, metrics and health on %s", node.agent_epoch, address, admin_address)
        try:
            await _first_of(supervisor.run(), cache.run(), publisher.run(), StatusWriter(node, cluster, str(address)).run())
        finally:
            await server.stop(telemetry.STOP_GRACE)


async def _until(stop: asyncio.Event, link: KeeperLink, *work: Coroutine[None, None, None]) -> None:
    """Run all of it until told to stop, the link is lost, or a part fails, which is raised."""
    try:
        await _first_of(_wait(stop), _wait(link.lost), *work)
    except AerostatError:
        if not link.lost.is_set():
            raise
    if link.fenced is not None:
        raise link.fenced
    if link.lost.is_set() and not stop.is_set():
        raise TemporaryError("KeeperLost", "the keeper's socket closed", retry_after=_REATTACH_AFTER)


async def _first_of(*work: Coroutine[None, None, None]) -> None:
    """Run all until the first one ends; the others are cancelled. Raises what it raised."""
    tasks = [asyncio.create_task(w) for w in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
