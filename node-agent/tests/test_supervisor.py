"""The agent's decisions carried out over a fake keeper in virtual time: starts and failures."""

import asyncio
import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from aerostat_agent.engine_events import Finished, Handle, SessionsMissing, Unhealthy
from aerostat_agent.keeper_client import KeeperRefusalError
from aerostat_agent.notes import EngineNote
from aerostat_agent.policy.engines import KILL_AFTER
from aerostat_agent.policy.leases import Lease
from aerostat_agent.policy.memory import ContainerMemory
from aerostat_agent.policy.sessions import Row
from aerostat_agent.policy.tracks import Failure
from aerostat_agent.supervisor import LINK_LOST_LIMIT
from aerostat_agent.wakes import wake
from aerostat_core.defaults import RESTART_DELAYS
from aerostat_core.engine_launch import ADMIN_KEY_ENV, CALL_KEY_ENV, EXIT_BAD_SPEC, EngineLaunch
from aerostat_core.ids import Epoch, LeaseId, NamespacedName, Seconds, SessionKey
from aerostat_core.specs import EngineState
from aerostat_testing.agent_fakes import INSTANCE, AgentRig, asked, hello, instance_model, instance_spec, key, settle

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]

MODEL_A = NamespacedName("default", "a")


def now() -> Seconds:
    return asyncio.get_running_loop().time()


def state(rig: AgentRig, name: str = "a") -> tuple[EngineState, str]:
    verdict = rig.node.verdicts[key(name)]
    return verdict.state, verdict.reason


async def test_a_model_is_open_when_its_engine_said_hello_and_passed_the_token_probe(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.prober.seconds = 2.0
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        await settle()
        assert state(rig) == (EngineState.STARTING, "PreparingWeights")
        process = await rig.started("a")
        assert state(rig) == (EngineState.STARTING, "EngineStarting")
        assert rig.hello("a") == ""
        await asyncio.sleep(1.9)
        assert state(rig)[0] is EngineState.STARTING
        await asyncio.sleep(0.3)
        assert state(rig) == (EngineState.OPEN, "Serving")
        note = EngineNote.from_bytes(process.note)
        assert rig.prober.probed == [note.port]
        assert rig.node.figures_of(key("a")).n_opened == 1


async def test_what_is_started_is_told_the_keys_by_its_environment_and_nowhere_else(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a", kv=(1 << 20) + 5000)))
    async with rig.running():
        process = await rig.started("a")
    argv, env = rig.keeper.commands[process.epoch], rig.keeper.environments[process.epoch]
    launch = EngineLaunch.from_json(argv[-1])
    assert (launch.epoch, launch.instance, launch.model) == (process.epoch, str(INSTANCE), "a")
    assert launch.kv_tokens == 1024  # whole pages of the KV budget
    keys = env[CALL_KEY_ENV], env[ADMIN_KEY_ENV]
    assert len(set(keys)) == 2
    assert not any(k in " ".join(argv) for k in keys)
    note = EngineNote.from_bytes(process.note)
    assert not any(k in repr(note) for k in keys)


async def test_all_ranks_must_say_hello(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(replace(instance_spec(instance_model("a")), devices=(0, 1)))
    async with rig.running():
        await rig.started("a")
        rig.reports.on_hello(rig.identity("a"), hello(tensor_parallel=2))
        await settle()
        assert rig.prober.probed == []
        rig.reports.on_hello(rig.identity("a", rank=1), hello(tensor_parallel=2))
        await settle()
        assert state(rig)[0] is EngineState.OPEN
        assert "none of 2" in rig.reports.on_hello(rig.identity("a", rank=2), hello(tensor_parallel=2))


async def test_a_hello_of_another_epoch_is_refused(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        process = await rig.started("a")
        assert "epoch" in rig.hello("a", epoch=Epoch(process.epoch - 1))


async def test_an_engine_that_keeps_dying_is_started_again_with_growing_pauses_and_then_failed_with_its_last_words(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    starts: list[Seconds] = []
    async with rig.running():
        process = await rig.started("a")
        for _ in range(len(RESTART_DELAYS)):
            note = EngineNote.from_bytes(process.note)
            rig.keeper.end(process.epoch, 1, f"first\nout of memory api_key={note.call_key}\n")
            ended = now()
            process = await rig.started("a", after=process.epoch)
            starts.append(now() - ended)
        assert rig.n_prepared == 2, "its files are looked at before the last try"
        rig.keeper.end(process.epoch, 1, "the very last line\n")
        await asyncio.sleep(100)
        assert rig.keeper.engines == {}
        assert state(rig) == (EngineState.FAILED, "EngineExited")
        message = rig.node.verdicts[key("a")].message
        assert "exit code 1" in message
        assert "the very last line" in message
        assert "first" not in message  # the words of the run before
        answer = wake(rig.node, asked(MODEL_A))
        assert answer.refused == "EngineExited"
        rig.node.declare(instance_spec(instance_model("a", uri="file:///other")))
        await rig.started("a")  # a new spec gets new tries
    for waited, delay in zip(starts, RESTART_DELAYS, strict=True):
        assert delay <= waited < delay + 0.5


async def test_an_engine_that_died_is_started_again_though_its_source_is_away(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        process = await rig.started("a")
        rig.facts = {"error": {"reason": "HubUnreachable", "message": "no answer"}}
        rig.keeper.end(process.epoch, 1, "out of memory\n")
        await rig.started("a", after=process.epoch)
        assert rig.n_prepared == 1


async def test_secrets_do_not_reach_the_message(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        process = await rig.started("a")
        note = EngineNote.from_bytes(process.note)
        rig.keeper.end(process.epoch, -signal.SIGSEGV, f"args: {note.call_key} {note.admin_key}, hf_token='hf_abc', tokens=12\n")
        await settle()
        message = rig.node.verdicts[key("a")].message
    assert "signal SIGSEGV" in message
    assert "args: *** ***, hf_token=***, tokens=12" in message


async def test_a_taken_port_leads_to_another_try_with_another_port_at_once(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        process = await rig.started("a")
        ended = now()
        rig.keeper.end(process.epoch, 1, "[Errno 98] error while attempting to bind: address already in use\n")
        again = await rig.started("a", after=process.epoch)
        assert now() - ended < 0.5
    assert EngineNote.from_bytes(again.note).port != EngineNote.from_bytes(process.note).port


async def test_an_engine_that_refuses_its_spec_is_failed_at_once(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        process = await rig.started("a")
        rig.keeper.end(process.epoch, EXIT_BAD_SPEC, "engine: unknown fields\n")
        await settle()
        assert state(rig) == (EngineState.FAILED, "EngineSpecRefused")


async def test_a_failed_token_probe_is_a_failed_start_with_its_reason(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.prober.failure = Failure(reason="TokenProbeFailed", message="expected the tokens [4, 5], got [0, 0]")
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        process = await rig.open("a")
        await asyncio.sleep(0.5)
        assert state(rig) == (EngineState.STARTING, "TokenProbeFailed")
        assert rig.keeper.signals[0][1:] == (process.epoch, signal.SIGTERM)
        rig.prober.failure = None
        await rig.started("a", after=process.epoch)
        rig.hello("a")
        await settle()
        assert state(rig)[0] is EngineState.OPEN


@pytest.mark.parametrize("is_stubborn", [False, True])
async def test_an_unhealthy_engine_is_ended_and_started_again(tmp_path: Path, is_stubborn: bool) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        process = await rig.open("a")
        if is_stubborn:
            rig.keeper.stubborn.add(process.epoch)
        told = now()
        rig.reports.on_event(rig.identity("a"), Unhealthy(why="the scheduler hangs"))
        await rig.started("a", after=process.epoch)
        sent = [s for _, epoch, s in rig.keeper.signals if epoch == process.epoch]
        assert sent == [signal.SIGTERM, signal.SIGKILL] if is_stubborn else [signal.SIGTERM]
        assert now() - told >= (KILL_AFTER if is_stubborn else 0) + RESTART_DELAYS[0]


async def test_an_engine_that_does_not_come_back_to_its_agent_is_replaced(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        process = await rig.open("a")
        rig.reports.on_link_lost(rig.identity("a"))
        await asyncio.sleep(LINK_LOST_LIMIT - 1)
        assert state(rig)[0] is EngineState.OPEN
        assert rig.hello("a") == ""  # it came back
        await asyncio.sleep(LINK_LOST_LIMIT)
        assert rig.keeper.engines[key("a")].epoch == process.epoch
        rig.reports.on_link_lost(rig.identity("a"))
        await rig.started("a", after=process.epoch, limit=LINK_LOST_LIMIT + 10)


async def test_an_engine_that_dies_takes_its_leases_and_sessions_with_it_at_once(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    row = Row(key("a"), SessionKey("s"))
    async with rig.running():
        process = await rig.open("a")
        handle = Handle(epoch=process.epoch, prefix_hash=b"h", n_tokens=16)
        turn = Finished(session=row.session, handle=handle, n_prompt_tokens=20, n_output_tokens=2, n_cached_tokens=0)
        rig.reports.on_event(rig.identity("a"), turn)
        lease = Lease(id=LeaseId("l"), engine=key("a"), session=row.session, epoch=process.epoch, expires_at=rig.clock.wall() + 5)
        assert rig.node.install_lease(lease).lease == lease
        rig.node.sessions.take_changes()
        rig.keeper.end(process.epoch, -signal.SIGKILL)
        await settle()
        record = rig.node.sessions.get(row)
        assert record is not None
        assert record.handle is None
        assert len(rig.node.leases) == 0
        assert rig.node.sessions.take_changes()[0] == (row,)
        assert rig.node.install_lease(replace(lease, id=LeaseId("l2"))).reason == "EngineChanged"


async def test_sessions_that_the_engine_evicted_are_missing(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    row = Row(key("a"), SessionKey("s"))
    async with rig.running():
        process = await rig.started("a")
        rig.hello("a", sessions=((row.session, Handle(epoch=process.epoch, prefix_hash=b"h", n_tokens=16)),))
        record = rig.node.sessions.get(row)
        assert record is not None
        assert record.handle is not None
        rig.reports.on_event(rig.identity("a"), SessionsMissing(sessions=(row.session,)))
        record = rig.node.sessions.get(row)
        assert record is not None
        assert record.handle is None


async def test_a_source_that_cannot_be_prepared_is_tried_again_after_a_while(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.facts = {"error": {"reason": "SourceNotFound", "message": "/m does not exist"}}
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        await asyncio.sleep(2)
        assert state(rig) == (EngineState.FAILED, "SourceNotFound")
        assert rig.node.verdicts[key("a")].message == "/m does not exist"
        rig.facts = dict(AgentRig(tmp_path).facts)
        await rig.started("a")


async def test_two_models_of_one_source_are_prepared_once(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a"), instance_model("b")))
    async with rig.running():
        await rig.started("a")
        await rig.started("b")
        assert rig.n_prepared == 1


async def test_a_kv_budget_without_room_for_a_page_says_what_to_set(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a", kv=1000)))
    async with rig.running():
        await asyncio.sleep(2)
        assert state(rig) == (EngineState.FAILED, "KvBudgetTooSmall")
        assert "memory.kvMin" in rig.node.verdicts[key("a")].message


async def test_a_start_that_the_keeper_refuses_is_a_failure_like_any_other(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        await asyncio.sleep(0.5)
        rig.keeper.start_fails = KeeperRefusalError("StartFailed", "cannot start launch: no such file")
        await asyncio.sleep(1)
        assert state(rig) == (EngineState.STARTING, "StartFailed")
        assert rig.node.used(INSTANCE) == 0
        rig.keeper.start_fails = None
        await rig.started("a")


async def test_progress_of_a_preparation_is_shown(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        await asyncio.sleep(0.1)
        (process,) = rig.keeper.processes.values()
        progress = {"progress": {"step": "download", "done_bytes": 12 << 20, "total_bytes": 90 << 20}}
        process.log_path.write_text("some library says hello\n" + json.dumps(progress) + '\n{"half')
        await asyncio.sleep(0.6)
        assert rig.node.verdicts[key("a")].message == "download 12Mi of 90Mi"


async def test_a_node_that_is_smaller_than_its_pools_say_starts_nothing_and_says_what_to_change(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.memory = ContainerMemory(limit=1 << 20, shared=0)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        await settle()
        assert state(rig) == (EngineState.FAILED, "NodeTooSmall")
        assert "its engines have 1Mi" in rig.node.verdicts[key("a")].message
        assert not rig.keeper.processes
        rig.node.memory = ContainerMemory(limit=1 << 40, shared=0)
        rig.node.touch()
        await rig.started("a")
