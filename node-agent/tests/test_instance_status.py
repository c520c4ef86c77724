"""Instance.status: on change at most once a second, figures with the heartbeat, events once per transition."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from aerostat_agent.engine_events import Finished
from aerostat_agent.policy.engines import DRAIN_GRACE
from aerostat_agent.reconcile import follow_instances
from aerostat_agent.status import StatusWriter, instance_status
from aerostat_core.defaults import RESTART_DELAYS, STATUS_FIGURES_EVERY, STATUS_STATE_AT_MOST_EVERY
from aerostat_core.ids import SessionKey
from aerostat_core.resources import parse_instance, parse_instance_status
from aerostat_core.specs import EngineState, InstanceStatus
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.agent_fakes import INSTANCE, AgentRig, RecordingCluster, instance_resource, key, settle
from aerostat_testing.memory_cluster import MemoryCluster

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]

URI = "file:///m"
TIMES = {"first_token_seconds": 0.35, "seconds": 0.8}  # ten tokens: 50 ms for each but the first


@asynccontextmanager
async def reconciling(rig: AgentRig, cluster: MemoryCluster) -> AsyncGenerator[None, None]:
    synced = asyncio.Event()

    async def follow() -> None:
        async with aclosing(cluster.watch(Kind.INSTANCE)) as events:
            await follow_instances(events, rig.node, synced)

    async def write() -> None:
        await synced.wait()
        await StatusWriter(rig.node, cluster, "127.0.0.1:7").run()

    async with rig.running():
        tasks = [asyncio.create_task(follow()), asyncio.create_task(write())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, asyncio.CancelledError), outcome


async def latest(cluster: MemoryCluster) -> InstanceStatus:
    (instance,) = await cluster.list(Kind.INSTANCE)
    return parse_instance_status(instance)


async def test_status_follows_a_model_to_open_and_is_written_at_most_once_a_second(tmp_path: Path) -> None:
    rig, cluster = AgentRig(tmp_path), RecordingCluster(instance_resource(URI, "a"))
    async with reconciling(rig, cluster):
        await rig.open("a")
        await asyncio.sleep(3)
        status = await latest(cluster)
    assert (status.agent_epoch, status.agent_address, status.device_bytes) == (1, "127.0.0.1:7", 1 << 30)
    (model,) = status.models
    assert (model.state, model.reason, model.generation, model.weights_bytes) == (EngineState.OPEN, "Serving", 1, 10 << 20)
    (ready,) = status.conditions
    assert (ready.type, ready.status) == ("Ready", "True")
    assert len(cluster.written_at) > 1
    assert all(b - a >= STATUS_STATE_AT_MOST_EVERY for a, b in pairwise(cluster.written_at))
    assert [n.reason for n in cluster.notes] == ["EngineStarting", "Serving"]


async def test_figures_alone_are_written_with_the_slow_heartbeat(tmp_path: Path) -> None:
    rig, cluster = AgentRig(tmp_path), RecordingCluster(instance_resource(URI, "a"))
    async with reconciling(rig, cluster):
        await rig.open("a")
        await asyncio.sleep(STATUS_FIGURES_EVERY + 2)
        n = len(cluster.written_at)
        for _ in range(60):
            turn = Finished(session=SessionKey(""), handle=None, n_prompt_tokens=30, n_output_tokens=10, n_cached_tokens=20, **TIMES)
            rig.reports.on_event(rig.identity("a"), turn)
        await asyncio.sleep(STATUS_FIGURES_EVERY - 5)
        assert len(cluster.written_at) == n
        await asyncio.sleep(10)
        assert len(cluster.written_at) == n + 1
        (model,) = (await latest(cluster)).models
        assert model.requests_per_second == pytest.approx(1.0)
        assert model.tokens_per_second == pytest.approx(20.0)  # what was computed: uncached prompt and output
        assert model.ttft_p95 == 0.35
        assert model.attainment == 1.0
        assert model.reserve_bytes is None, "nobody measured it"


async def test_what_runs_of_an_earlier_declaration_says_so_from_the_moment_on_in_which_another_is_declared(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(parse_instance(instance_resource(URI, "a")))

    def told() -> tuple[int, EngineState]:
        (model,) = instance_status(rig.node, rig.node.specs[INSTANCE], "127.0.0.1:7", "2026-01-01T00:00:00Z", None).models
        return model.generation, model.state

    async with rig.running():
        first = await rig.open("a")
        assert told() == (1, EngineState.OPEN)
        same = instance_resource(URI, "a")
        same["spec"]["models"][0] |= {"generation": 2, "slo": {"ttft": "9s", "tpot": "100ms", "holdBudget": "10s"}}
        rig.node.declare(parse_instance(same))
        assert told() == (2, EngineState.OPEN), "the same engine serves both"
        other = instance_resource(URI, "a", kv="2Mi")
        other["spec"]["models"][0]["generation"] = 3
        rig.node.declare(parse_instance(other))
        assert told() == (1, EngineState.OPEN)
        await rig.started("a", after=first.epoch, limit=DRAIN_GRACE + 10)
        assert rig.hello("a") == ""
        await settle()
        assert told() == (3, EngineState.OPEN)


async def test_a_failing_engine_is_noted_once_and_not_per_retry(tmp_path: Path) -> None:
    rig, cluster = AgentRig(tmp_path), RecordingCluster(instance_resource(URI, "a"))
    async with reconciling(rig, cluster):
        process = await rig.started("a")
        for _ in RESTART_DELAYS:
            rig.keeper.end(process.epoch, 1, "out of memory\n")
            process = await rig.started("a", after=process.epoch)
        rig.keeper.end(process.epoch, 1, "out of memory\n")
        await asyncio.sleep(5)
        (model,) = (await latest(cluster)).models
        assert (model.state, model.reason, model.restarts) == (EngineState.FAILED, "EngineExited", len(RESTART_DELAYS) + 1)
        assert "out of memory" in model.message
        (ready,) = (await latest(cluster)).conditions
        assert (ready.status, ready.reason) == ("False", "EngineExited")
        assert "model a: the engine ended with exit code 1" in ready.message
    assert [(n.reason, n.warning) for n in cluster.notes] == [("EngineStarting", False), ("EngineExited", True), ("EngineExited", True)]
    assert "started again" in cluster.notes[1].message  # and the last one says that it is not


async def test_a_deleted_instance_drains_and_its_status_is_left_alone(tmp_path: Path) -> None:
    rig, cluster = AgentRig(tmp_path), RecordingCluster(instance_resource(URI, "a"))
    async with reconciling(rig, cluster):
        await rig.open("a")
        await asyncio.sleep(2)
        n = len(cluster.written_at)
        await cluster.delete(Kind.INSTANCE, INSTANCE)
        await asyncio.sleep(200)
        assert rig.node.specs == {}
        assert rig.keeper.processes == {}
        assert len(cluster.written_at) == n


async def test_an_instance_that_is_made_anew_has_a_status_within_seconds_even_if_it_is_the_same_as_the_last_one(tmp_path: Path) -> None:
    rig, cluster = AgentRig(tmp_path), RecordingCluster(instance_resource(URI, "a"))
    async with reconciling(rig, cluster):
        await rig.started("a")
        await asyncio.sleep(STATUS_FIGURES_EVERY / 10)
        assert (await latest(cluster)).conditions[0].message == "model a: Starting"
        await cluster.delete(Kind.INSTANCE, INSTANCE)
        await settle()
        await cluster.apply(instance_resource(URI, "a"))
        await asyncio.sleep(STATUS_FIGURES_EVERY / 10)
        assert [m.name for m in (await latest(cluster)).models] == ["a"]


async def test_instances_of_other_nodes_are_none_of_our_business(tmp_path: Path) -> None:
    rig, cluster = AgentRig(tmp_path), RecordingCluster(instance_resource(URI, "a", node="elsewhere"))
    async with reconciling(rig, cluster):
        await asyncio.sleep(2)
        assert rig.node.specs == {}
        assert cluster.written_at == []


async def test_the_transition_time_of_a_condition_stays_while_its_status_does(tmp_path: Path) -> None:
    rig, cluster = AgentRig(tmp_path), RecordingCluster(instance_resource(URI, "a"))
    async with reconciling(rig, cluster):
        await asyncio.sleep(0.5)
        first = (await latest(cluster)).conditions[0].last_transition_time
        process = await rig.started("a")
        await asyncio.sleep(3)
        assert (await latest(cluster)).conditions[0].last_transition_time == first
        assert (await latest(cluster)).conditions[0].reason == "EngineStarting"
        assert rig.hello("a") == ""
        await settle()
        await asyncio.sleep(3)
        assert (await latest(cluster)).conditions[0].last_transition_time > first
        assert process.exit_code is None


async def test_calls_that_miss_a_target_lower_attainment_and_those_without_a_first_token_say_nothing(tmp_path: Path) -> None:
    rig, cluster = AgentRig(tmp_path), RecordingCluster(instance_resource(URI, "a"))
    turn = Finished(session=SessionKey(""), handle=None, n_prompt_tokens=30, n_output_tokens=10, n_cached_tokens=0)
    async with reconciling(rig, cluster):
        await rig.started("a")
        rig.hello("a")
        rig.reports.on_event(rig.identity("a"), replace(turn, first_token_seconds=99.0, seconds=99.0))  # the token probe
        await settle()
        slo = rig.node.slo_of(key("a"))
        assert slo is not None
        slow = slo.ttft + 1
        for first, seconds in ((0.1, 0.2), (slow, slow), (0.1, 0.1 + 9 * slo.tpot + 1), (None, 50.0)):
            rig.reports.on_event(rig.identity("a"), replace(turn, first_token_seconds=first, seconds=seconds))
        await asyncio.sleep(STATUS_FIGURES_EVERY + 10)
        (model,) = (await latest(cluster)).models
    assert model.ttft_p95 == slow
    assert model.attainment == pytest.approx(1 / 3)
