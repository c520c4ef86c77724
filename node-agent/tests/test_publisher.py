"""The telemetry stream: full first, then consecutive deltas, a message each heartbeat, slow readers bounded."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from aerostat.v1 import telemetry_pb2 as tpb
from aerostat_agent.engine_events import Boundary, Finished, Handle, ProfilePoint, SessionsMissing
from aerostat_agent.policy.demand import Demand
from aerostat_agent.policy.leases import Lease
from aerostat_agent.publisher import MAX_QUEUED, MIN_INTERVAL, Publisher
from aerostat_core.defaults import HEARTBEAT
from aerostat_core.ids import Epoch, LeaseId, NamespacedName, SessionKey
from aerostat_testing.agent_fakes import INSTANCE, AgentRig, instance_model, instance_spec, key, settle

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]


@asynccontextmanager
async def publishing(rig: AgentRig) -> AsyncGenerator[Publisher, None]:
    publisher = Publisher(rig.node)
    async with rig.running():
        task = asyncio.create_task(publisher.run())
        try:
            yield publisher
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Follower:
    """What a router would know, by the rules of the stream."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.models: dict[tuple[str, str], tpb.ModelState] = {}
        self.sessions: dict[str, tpb.SessionState] = {}
        self.demand: dict[str, int] = {}
        self.n_full = 0

    def apply(self, message: tpb.TelemetryMessage) -> None:
        if message.full:
            self.models.clear()
            self.sessions.clear()
            self.demand.clear()
            self.n_full += 1
        else:
            assert self.version is not None
            assert message.version == self.version + 1, "a gap"
        self.version = message.version
        for i in message.instances:
            self.models = {k: m for k, m in self.models.items() if k[0] != f"{i.namespace}/{i.name}"}
            self.models |= {(f"{i.namespace}/{i.name}", m.model): m for m in i.models}
        self.models = {k: m for k, m in self.models.items() if k[0] not in message.removed_instances}
        self.sessions |= {s.session: s for s in message.sessions}
        for session in message.forgotten_sessions:
            self.sessions.pop(session, None)
        self.demand |= {d.model: d.arrivals for d in message.demand}

    def model(self, name: str) -> tpb.ModelState:
        return self.models[str(INSTANCE), name]


@asynccontextmanager
async def following(publisher: Publisher) -> AsyncGenerator[Follower, None]:
    follower = Follower()

    async def follow() -> None:
        async with aclosing(publisher.subscribe()) as stream:  # type: ignore[type-var]
            async for message in stream:
                follower.apply(message)

    task = asyncio.create_task(follow())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def turn(session: str, epoch: Epoch) -> Finished:
    handle = Handle(epoch=epoch, prefix_hash=b"h", n_tokens=32)
    return Finished(session=SessionKey(session), handle=handle, n_prompt_tokens=40, n_output_tokens=4, n_cached_tokens=8)


async def test_a_subscriber_gets_a_full_snapshot_and_then_every_version(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with publishing(rig) as publisher, following(publisher) as early:
        process = await rig.open("a")
        async with following(publisher) as late:
            rig.reports.on_event(rig.identity("a"), turn("s", process.epoch))
            rig.reports.on_event(rig.identity("a"), Boundary(running=1, waiting=2, waiting_tokens=64, kv_used_tokens=24))
            rig.reports.on_event(rig.identity("a"), ProfilePoint(is_prefill=True, n=64, seconds=0.5))
            await asyncio.sleep(1)
            for follower in (early, late):
                assert follower.n_full == 1
                model = follower.model("a")
                assert (model.state, model.engine_epoch, model.max_running) == (tpb.OPEN, process.epoch, 4)
                assert (model.running, model.waiting, model.kv_free_tokens) == (1, 2, 1000)
                assert model.queue_seconds == pytest.approx(0.5 + 0.05)
                assert (model.host, bool(model.port), bool(model.call_key)) == ("127.0.0.1", True, True)
                session = follower.sessions["s"]
                assert (session.tier, session.handle.n_tokens, session.turns) == (tpb.DEVICE, 32, 1)
            assert early.models == late.models


async def test_there_is_a_message_each_heartbeat_though_nothing_changes(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    async with publishing(rig) as publisher, following(publisher) as follower:
        await settle()
        before = follower.version
        await asyncio.sleep(10 * HEARTBEAT)
        assert before is not None
        assert follower.version is not None
        assert 9 <= follower.version - before <= 11


async def test_a_change_is_published_at_once_and_a_burst_of_changes_in_one_message(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with publishing(rig) as publisher, following(publisher) as follower:
        process = await rig.open("a")
        await asyncio.sleep(HEARTBEAT)
        before = follower.version
        assert before is not None
        for i in range(50):
            rig.reports.on_event(rig.identity("a"), turn(f"s{i}", process.epoch))
        await asyncio.sleep(0.03)
        assert len(follower.sessions) == 50
        assert follower.version is not None
        assert follower.version - before <= 2


async def test_the_death_of_an_engine_reaches_routers_at_once_with_its_sessions_and_leases(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with publishing(rig) as publisher, following(publisher) as follower:
        process = await rig.open("a")
        rig.reports.on_event(rig.identity("a"), turn("s", process.epoch))
        lease = Lease(id=LeaseId("l"), engine=key("a"), session=SessionKey("s"), epoch=process.epoch, expires_at=rig.clock.wall() + 30)
        rig.node.install_lease(lease)
        await settle()
        assert follower.sessions["s"].lease.id == "l"
        rig.keeper.end(process.epoch, -9)
        await asyncio.sleep(0.03)
        assert (follower.model("a").state, follower.model("a").host) != (tpb.OPEN, "127.0.0.1")
        assert follower.sessions["s"].tier == tpb.MISSING
        assert not follower.sessions["s"].HasField("lease")
        assert not follower.sessions["s"].HasField("handle")


async def test_an_expired_lease_is_published_within_a_heartbeat(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with publishing(rig) as publisher, following(publisher) as follower:
        process = await rig.open("a")
        lease = Lease(id=LeaseId("l"), engine=key("a"), session=SessionKey("s"), epoch=process.epoch, expires_at=rig.clock.wall() + 1)
        rig.node.install_lease(lease)
        await settle()
        assert follower.sessions["s"].lease.units == 1
        await asyncio.sleep(1 + HEARTBEAT)
        assert not follower.sessions["s"].HasField("lease")
        assert rig.node.lease_counts == {"installed": 1, "expired": 1}


async def test_an_instance_that_went_is_removed(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a", resident=False)))
    async with publishing(rig) as publisher, following(publisher) as follower:
        await settle()
        assert list(follower.models) == [(str(INSTANCE), "a")]
        rig.node.withdraw(INSTANCE)
        await asyncio.sleep(1)
        assert follower.models == {}


async def test_a_reader_that_is_too_slow_gets_a_full_snapshot_instead_of_a_longer_queue(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a", resident=False)))
    async with publishing(rig) as publisher:
        async with aclosing(publisher.subscribe()) as stream:  # type: ignore[type-var]
            follower = Follower()
            follower.apply(await anext(stream))
            for _ in range(3 * MAX_QUEUED):
                publisher.publish()
            (subscriber,) = publisher._subscribers
            assert len(subscriber.queue) <= MAX_QUEUED
            for _ in range(5):
                follower.apply(await anext(stream))
            assert follower.n_full == 2
        assert publisher.n_subscribers == 0


async def test_sums_of_demand_are_sent_when_they_change_and_end_with_a_silent_router(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    async with publishing(rig) as publisher, following(publisher) as follower:
        model = NamespacedName("default", "a")
        for router, n in (("r1", 3), ("r2", 4), ("r1", 5)):
            rig.node.demand.report(router, [Demand(model=model, arrivals=n)], window=1.0, now=rig.clock.monotonic())
        await asyncio.sleep(2 * HEARTBEAT)
        assert follower.demand == {"a": 9}
        await asyncio.sleep(3)
        assert follower.demand == {"a": 0}


async def test_a_handle_of_another_run_of_the_engine_is_missing(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with publishing(rig) as publisher, following(publisher) as follower:
        process = await rig.open("a")
        stale = turn("s", process.epoch)
        assert stale.handle is not None
        stale = replace(stale, handle=replace(stale.handle, epoch=Epoch(process.epoch - 1)))
        rig.reports.on_event(rig.identity("a"), stale)
        await settle()
        assert follower.sessions["s"].tier == tpb.MISSING


async def test_a_lease_for_a_turn_that_the_engine_has_still_to_report_does_not_say_missing(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with publishing(rig) as publisher, following(publisher) as follower:
        process = await rig.open("a")
        tiers = []

        async def told() -> None:
            await asyncio.sleep(0.05)
            tiers.append(follower.sessions["s"].tier)

        lease = Lease(id=LeaseId("l1"), engine=key("a"), session=SessionKey("s"), epoch=process.epoch, expires_at=rig.clock.wall() + 30)
        rig.node.install_lease(lease)
        await told()
        rig.node.consume_lease(lease.id, lease.session)
        await told()
        rig.reports.on_event(rig.identity("a"), turn("s", process.epoch))
        await told()
        rig.reports.on_event(rig.identity("a"), SessionsMissing(sessions=(SessionKey("s"),)))
        await told()
        rig.node.install_lease(replace(lease, id=LeaseId("l2")))
        await told()
        rig.reports.on_event(rig.identity("a"), replace(turn("s", process.epoch), handle=None))  # it kept nothing
        await told()
        unknown = tpb.TIER_UNSPECIFIED
        assert tiers == [unknown, unknown, tpb.DEVICE, tpb.MISSING, unknown, tpb.MISSING]


async def test_a_busy_agent_publishes_no_more_often_than_its_shortest_interval(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with publishing(rig) as publisher, following(publisher) as follower:
        process = await rig.open("a")
        before = follower.version
        assert before is not None
        for i in range(1000):
            rig.reports.on_event(rig.identity("a"), turn(f"s{i}", process.epoch))
            await asyncio.sleep(0.001)
        await asyncio.sleep(MIN_INTERVAL)
        assert follower.version is not None
        assert follower.version - before <= 1 / MIN_INTERVAL + 2
        assert len(follower.sessions) == 1000
