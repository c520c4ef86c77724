"""Engines listen where their keeper says, which is another pod than the agent's; with TLS nobody calls them or the agent without it."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from aerostat.v1 import telemetry_pb2 as tpb
from aerostat_agent.notes import EngineNote
from aerostat_agent.site import EngineSite
from aerostat_agent.snapshot import instance_states
from aerostat_core import peers
from aerostat_core.specs import EngineState
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.agent_fakes import INSTANCE, AgentRig, FakeKeeper, instance_model, instance_resource, instance_spec, key
from aerostat_testing.agent_processes import NodeProcesses, node_processes, telemetry_of
from aerostat_testing.certificates import Authority
from aerostat_testing.fake_engine import FakeModel
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu

ELSEWHERE = EngineSite(host="fd00::7", tls_dir="/etc/aerostat/tls")


@pytest.mark.looptime
async def test_an_engine_is_started_for_its_keepers_site_and_stays_there_for_the_next_agent(tmp_path: Path) -> None:
    keeper = FakeKeeper()
    keeper.site = ELSEWHERE
    first, second = (AgentRig(tmp_path, keeper) for _ in range(2))
    first.node.declare(instance_spec(instance_model("a")))
    async with first.running():
        process = await first.open("a")
        note = EngineNote.from_bytes(process.note)
        assert (note.host, note.port) == (ELSEWHERE.host, keeper.next_port)
        told = json.loads(keeper.commands[process.epoch][-1])
        assert (told["host"], told["port"], told["tls_dir"]) == (note.host, note.port, ELSEWHERE.tls_dir)
    second.node.declare(instance_spec(instance_model("a")))
    async with second.running():
        await second.open("a")
        (model,) = instance_states(second.node)[INSTANCE].models
        assert (model.host, model.port) == (note.host, note.port)


@pytest.mark.looptime
async def test_a_start_for_which_there_is_no_port_is_tried_again(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.keeper.has_ports = False
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        await asyncio.sleep(1.5)
        verdict = rig.node.verdicts[key("a")]
        assert (verdict.state, verdict.reason) == (EngineState.STARTING, "NoFreePort")
        rig.keeper.has_ports = True
        await rig.started("a")


async def model_state(node: NodeProcesses) -> tpb.ModelState:
    """As a router gets it."""
    router = TlsFolder(node.tls_dir(peers.ROUTER))
    async with telemetry_of((await node.status())["agentAddress"], router) as told:
        async for message in told.Subscribe(tpb.SubscribeRequest(router="r"), timeout=60):
            return message.instances[0].models[0]
    raise AssertionError("the stream ended")


async def test_a_node_serves_by_tls_alone_and_at_its_own_address_also_for_the_next_agent(tmp_path: Path) -> None:
    uri = FakeModel().write(tmp_path / "m")
    async with node_processes(tmp_path, Authority()) as node:
        await node.cluster.apply(instance_resource(uri, "a"))
        node.start_keeper("--engine-host", "127.0.0.2")
        node.start_agent()
        before = await node.until_state("a", "Open")  # so its token probe went by TLS
        model = await model_state(node)
        assert (model.state, model.host) == (tpb.OPEN, "127.0.0.2")
        assert node.agent is not None
        await node.end(node.agent, signal.SIGKILL)
        node.start_agent()
        await node.until_state("a", "Open", agent_epoch_after=before["agentEpoch"])
        adopted = await model_state(node)
        assert (adopted.engine_epoch, adopted.host, adopted.port) == (model.engine_epoch, model.host, model.port)


async def test_tls_at_one_end_only_is_a_fatal_setting(tmp_path: Path) -> None:
    async with node_processes(tmp_path, Authority()) as node:
        node.start_keeper()
        node.authority = None
        node.start_agent()
        assert node.agent is not None
        assert await eventually(node.agent.poll, "the agent ends", limit=60) == 2
        assert "must both be given --tls-dir, or neither" in node.said("agent")
