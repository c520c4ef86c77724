"""Ends in peace, adoption by a new agent, wakes: over a fake keeper in virtual time."""

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from aerostat_agent.engine_events import Boundary, Unhealthy
from aerostat_agent.keeper_client import FencedError
from aerostat_agent.policy.engines import DRAIN_GRACE, SETTLE
from aerostat_agent.policy.tracks import Phase
from aerostat_agent.wakes import wake
from aerostat_core.ids import Epoch, NamespacedName, Seconds
from aerostat_core.specs import EngineState
from aerostat_testing.agent_fakes import INSTANCE, AgentRig, FakeKeeper, asked, instance_model, instance_spec, key, settle

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]

MODEL_A = NamespacedName("default", "a")


def now() -> Seconds:
    return asyncio.get_running_loop().time()


def state(rig: AgentRig, name: str = "a") -> tuple[EngineState, str]:
    verdict = rig.node.verdicts[key(name)]
    return verdict.state, verdict.reason


async def test_before_an_engine_ends_in_peace_it_is_published_as_draining_and_its_calls_finish(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        process = await rig.open("a")
        rig.engines.answers[key("a")] = Boundary(running=1)
        published = rig.node.watch()
        drained = now()
        rig.node.declare(instance_spec())
        await settle()
        assert published.is_set()
        assert state(rig) == (EngineState.DRAINING, "NotWanted")
        await asyncio.sleep(20)
        assert rig.keeper.signals == []  # one call still runs
        rig.engines.answers[key("a")] = Boundary()
        await asyncio.sleep(1)
        ((at, epoch, signum),) = rig.keeper.signals
        assert (epoch, signum) == (process.epoch, signal.SIGTERM)
        assert at - drained >= 20
        await asyncio.sleep(1)
        assert key("a") not in rig.node.tracks
        assert rig.keeper.processes == {}


async def test_an_idle_engine_still_waits_until_routers_know(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        await rig.open("a")
        rig.engines.answers[key("a")] = Boundary()
        drained = now()
        rig.node.declare(instance_spec(instance_model("a"), draining=True))
        await asyncio.sleep(2)
        ((at, _, _),) = rig.keeper.signals
        assert SETTLE <= at - drained < SETTLE + 0.5


async def test_a_call_that_never_finishes_does_not_hold_a_drain_for_ever(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        await rig.open("a")
        rig.engines.answers[key("a")] = Boundary(running=1)
        drained = now()
        rig.node.withdraw(INSTANCE)
        await asyncio.sleep(DRAIN_GRACE + 1)
        ((at, _, _),) = rig.keeper.signals
        assert at - drained >= DRAIN_GRACE
        await asyncio.sleep(1)
        assert rig.node.specs == {}  # a deleted instance goes with its last engine


async def test_a_new_agent_adopts_what_runs_and_starts_no_second_engine(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    spec = instance_spec(instance_model("a"), instance_model("w", resident=False))
    rig.node.declare(spec)
    async with rig.running():
        await rig.open("a")
        wake(rig.node, asked(NamespacedName("default", "w")))
        await rig.started("w")
        before = dict(rig.keeper.engines)
    again = AgentRig(tmp_path, rig.keeper)
    again.node.declare(spec)
    async with again.running():
        await settle()
        assert state(again) == (EngineState.STARTING, "Adopted")
        for name in ("a", "w"):
            assert again.hello(name) == ""
        await asyncio.sleep(10)
        assert state(again, "a") == state(again, "w") == (EngineState.OPEN, "Serving")
        assert again.keeper.engines == before
        assert rig.keeper.signals == []
        assert again.n_prepared == 0
        assert again.node.figures_of(key("a")).n_opened == 0  # nobody knows how long its start took


async def test_a_new_agent_accounts_for_what_ended_meanwhile_and_kills_strays(tmp_path: Path) -> None:
    keeper = FakeKeeper()
    rig = AgentRig(tmp_path, keeper)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        process = await rig.open("a")
        await keeper.start(epoch=Epoch(process.epoch + 1), argv=["x"], env={}, log_path=tmp_path / "x.log", note=b"who knows")
    keeper.end(process.epoch, 1, "killed while nobody looked\n")
    while not keeper.exits.empty():
        keeper.exits.get_nowait()  # told to the agent before, which is gone
    again = AgentRig(tmp_path, keeper)
    again.node.declare(instance_spec(instance_model("a")))
    async with again.running():
        await settle()
        assert set(keeper.processes) == {p.epoch for p in keeper.processes.values() if p.note == b'{"prepare": {}}'}
        assert keeper.signals[-1][1:] == (Epoch(process.epoch + 1), signal.SIGKILL)
        assert again.node.tracks[key("a")].attempts.n_failures == 1
        started = await again.started("a")
        assert started.epoch > process.epoch + 1


async def test_an_adopted_engine_that_nobody_wants_any_more_is_drained(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        await rig.open("a")
    again = AgentRig(tmp_path, rig.keeper)
    again.node.declare(instance_spec())
    async with again.running():
        await settle()
        assert again.node.tracks[key("a")].phase is Phase.DRAINING


async def test_wakes_are_one_wake_and_a_woken_model_stays_until_its_spec_changes(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    sleeping = instance_model("a", resident=False)
    rig.node.declare(instance_spec(sleeping))
    async with rig.running():
        await settle()
        assert state(rig) == (EngineState.ABSENT, "NotResident")
        answers = [wake(rig.node, asked(MODEL_A)) for _ in range(3)]
        await rig.open("a")
        answers.append(wake(rig.node, asked(MODEL_A)))
        assert [a.instance for a in answers] == ["cpu-0"] * 4
        assert not any(a.refused for a in answers)
        assert answers[0].open_in > 0
        assert answers[-1].open_in == 0
        assert rig.n_prepared == len(rig.keeper.engines) == 1
        rig.node.declare(instance_spec(replace(sleeping, generation=2)))  # nothing that the engine runs has changed
        await asyncio.sleep(5)
        assert state(rig)[0] is EngineState.OPEN
        rig.node.declare(instance_spec(replace(sleeping, source_uri="file:///other")))
        await settle()
        assert state(rig)[0] is EngineState.DRAINING
        assert rig.node.woken == set()


async def test_a_wake_that_cannot_be_is_refused_with_its_reason(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a", resident=False), memory=5 << 20))
    async with rig.running():
        await settle()
        assert wake(rig.node, asked(MODEL_A, "elsewhere", is_settled=True)).refused == "NoSuchInstance"
        assert wake(rig.node, asked(NamespacedName("default", "unknown"))).refused == "ModelNotAllowed"
        assert not wake(rig.node, asked(MODEL_A)).refused
        await asyncio.sleep(2)
        answer = wake(rig.node, asked(MODEL_A))
        assert answer.refused == "InsufficientMemory"
        assert "there are 5Mi of 5Mi" in answer.message
        rig.node.declare(instance_spec(instance_model("a", resident=False), draining=True))
        assert wake(rig.node, asked(MODEL_A)).refused == "InstanceDraining"


async def test_a_fenced_agent_does_not_go_on(tmp_path: Path) -> None:
    class Fencing(FakeKeeper):
        async def signal(self, epoch: Epoch, signum: signal.Signals) -> None:
            raise FencedError("Fenced", "another agent commands")

    rig = AgentRig(tmp_path, Fencing())
    rig.node.declare(instance_spec(instance_model("a")))

    async def go_on() -> None:
        async with rig.running():
            await rig.started("a")
            rig.reports.on_event(rig.identity("a"), Unhealthy(why="x"))
            await asyncio.sleep(1)

    with pytest.raises(FencedError):
        await go_on()
