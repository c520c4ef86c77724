"""A session that returns within its lease's time finds the lease on every turn, whoever tells of the turn first: router or engine.

The agent's node, its publisher and the router's memory are the real ones; what lies between them is a delay. Virtual time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from aerostat.v1 import telemetry_pb2 as tpb
from aerostat_agent import telemetry
from aerostat_agent.engine_events import Finished, Handle, SessionsMissing
from aerostat_agent.publisher import Publisher
from aerostat_core.ids import Epoch, LeaseId, NamespacedName, Seconds, SessionKey
from aerostat_router.background import Background
from aerostat_router.fleet import Fleet
from aerostat_router.lease_outbox import LeaseOutbox
from aerostat_router.policy.placement import judge_lease
from aerostat_router.policy.views import LeaseView
from aerostat_router.wire import UpdateReader, lease_updates
from aerostat_testing.agent_fakes import INSTANCE, AgentRig, instance_model, instance_spec

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]

MODEL = NamespacedName("default", "a")
SESSION = SessionKey("s")


@dataclass
class Pair:
    rig: AgentRig
    fleet: Fleet
    outbox: LeaseOutbox
    epoch: Epoch
    n_leases: int = 0

    def complete(self) -> None:
        """The router sees a turn end."""
        self.n_leases += 1
        expires_at = self.rig.clock.monotonic() + 1.0
        lease = LeaseView(
            id=LeaseId(f"l{self.n_leases}"), session=SESSION, model=MODEL, instance=INSTANCE, epoch=self.epoch, expires_at=expires_at
        )
        self.fleet.leases.install(lease)
        self.outbox.install(lease)

    async def report(self, delay: Seconds, *, evicts: bool) -> None:
        """The engine tells of it; it may have dropped what the session had there before."""
        await asyncio.sleep(delay)
        if evicts:
            self.rig.reports.on_event(self.rig.identity("a"), SessionsMissing(sessions=(SESSION,)))
        handle = Handle(epoch=self.epoch, prefix_hash=b"h", n_tokens=16)
        turn = Finished(session=SESSION, handle=handle, n_prompt_tokens=20, n_output_tokens=2, n_cached_tokens=0)
        self.rig.reports.on_event(self.rig.identity("a"), turn)

    def come_back(self) -> str | None:
        """Why the lease is not honoured."""
        now = self.rig.clock.monotonic()
        lease = self.fleet.leases.find(SESSION, MODEL, now)
        if lease is None:
            return "no lease"
        refused = judge_lease(lease, self.fleet.candidate(INSTANCE, MODEL), self.fleet.holdings(SESSION, MODEL), ())
        self.fleet.leases.consume(lease)
        self.outbox.consume(lease)
        return refused


@asynccontextmanager
async def pair(run_dir: Path, *, latency: Seconds) -> AsyncIterator[Pair]:
    rig, fleet, background = AgentRig(run_dir), Fleet(lambda models: None), Background()
    rig.node.declare(instance_spec(instance_model("a")))
    publisher = Publisher(rig.node)
    service = telemetry.TelemetryService(rig.node, publisher)

    async def tell(consumed: list[LeaseView], installed: list[tuple[LeaseView, Seconds]]) -> dict[LeaseId, str]:
        await asyncio.sleep(latency)
        reply = await service.UpdateLeases(lease_updates(consumed, installed), None)  # type: ignore[arg-type]  # nothing malformed
        return {LeaseId(refusal.lease_id): refusal.reason for refusal in reply.refused}

    async def follow() -> None:
        reader = UpdateReader()
        async with aclosing(publisher.subscribe()) as stream:  # type: ignore[type-var]
            async for message in stream:
                assert isinstance(message, tpb.TelemetryMessage)
                now = rig.clock.monotonic()
                assert fleet.apply("agent", reader.read(message, now), now)

    async with rig.running():
        process = await rig.open("a")
        tasks = [asyncio.create_task(publisher.run()), asyncio.create_task(follow())]
        await asyncio.sleep(0.5)
        outbox = LeaseOutbox(tell, lambda lease, why: fleet.leases.refused(lease, why), rig.clock, background)
        try:
            yield Pair(rig, fleet, outbox, process.epoch)
            await asyncio.sleep(1.5)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    assert len(rig.node.leases) == len(fleet.leases) == 0
    fleet.check_integrity()


@pytest.mark.parametrize("gap", [0.0, 0.004, 0.03, 0.3, 0.9])
@pytest.mark.parametrize("report_delay", [0.0, 0.01, 0.06, 0.5])
@pytest.mark.parametrize("latency", [0.001, 0.04])
@pytest.mark.parametrize("evicts", [False, True])
async def test_every_turn_after_the_first_finds_its_lease(
    tmp_path: Path, gap: Seconds, report_delay: Seconds, latency: Seconds, evicts: bool
) -> None:
    async with pair(tmp_path, latency=latency) as p:
        refusals = []
        for turn in range(6):
            if turn:
                refusals.append(p.come_back())
                await asyncio.sleep(0.05)  # it is served
            reporting = asyncio.create_task(p.report(report_delay, evicts=evicts))
            p.complete()
            await asyncio.sleep(gap)
            if gap > report_delay:
                await reporting
        assert refusals == [None] * 5
        await asyncio.sleep(1.0)
