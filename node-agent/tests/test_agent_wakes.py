"""Where a model is opened is settled once, wherever that is; a second need is another wake."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_agent.policy.settlements import LASTS, Settlements
from aerostat_agent.wakes import wake
from aerostat_core.ids import InstanceName, NamespacedName
from aerostat_core.specs import EngineState
from aerostat_testing.agent_fakes import INSTANCE, AgentRig, asked, instance_model, instance_spec, key, settle

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]

MODEL_A = NamespacedName("default", "a")
SLEEPING = instance_model("a", resident=False)


async def test_the_first_proposal_is_the_answer_to_all_who_ask_meanwhile_on_whatever_node_it_lies(tmp_path: Path) -> None:
    owner, other = AgentRig(tmp_path), AgentRig(tmp_path)
    owner.node.declare(instance_spec(SLEEPING))
    other.node.declare(replace(instance_spec(SLEEPING), name=INSTANCE.sibling("far-0")))
    answers = [wake(owner.node, asked(MODEL_A, place)) for place in ("far-0", "cpu-0", "far-1")]
    assert [(a.instance, a.refused) for a in answers] == [("far-0", "")] * 3
    assert owner.node.woken == set(), "another agent's instance is not opened here"
    answer = wake(other.node, asked(MODEL_A, "far-0", is_settled=True))
    assert (answer.instance, answer.refused) == ("far-0", "")
    assert {str(woken.instance) for woken in other.node.woken} == {"default/far-0"}


async def test_a_place_that_was_refused_or_is_open_leaves_the_need_to_the_next_proposal(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(SLEEPING))
    assert wake(rig.node, asked(MODEL_A, "far-0")).instance == "far-0"
    assert wake(rig.node, asked(MODEL_A, "far-1", "far-0")).instance == "far-1"
    assert wake(rig.node, asked(MODEL_A, "far-0")).instance == "far-1"


async def test_what_is_refused_here_is_not_settled(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(SLEEPING, draining=True))
    assert wake(rig.node, asked(MODEL_A)).refused == "InstanceDraining"
    assert wake(rig.node, asked(MODEL_A, "far-0")).instance == "far-0"


async def test_a_second_replica_opens_on_a_node_where_the_model_is_open_already(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    second = INSTANCE.sibling("cpu-1")
    rig.node.declare(instance_spec(SLEEPING))
    rig.node.declare(replace(instance_spec(SLEEPING), name=second))
    async with rig.running():
        await settle()
        assert wake(rig.node, asked(MODEL_A)).instance == "cpu-0"
        await rig.open("a")
        assert rig.node.verdicts[key("a")].state is EngineState.OPEN
        assert wake(rig.node, asked(MODEL_A, "cpu-1", "cpu-0")).instance == "cpu-1"
        await settle()
        assert {woken.instance for woken in rig.node.woken} == {INSTANCE, second}


async def test_who_asks_without_a_settlement_is_told_what_comes_up_here_anyway(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with rig.running():
        await rig.started("a")
        answer = wake(rig.node, asked(MODEL_A, "far-0"))
        assert (answer.instance, answer.open_in > 0) == ("cpu-0", True)


PLACES = ("p", "q", "r")


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.sets(st.sampled_from(PLACES), max_size=2), st.floats(0, 2 * LASTS)), max_size=30))
@pytest.mark.looptime(False)
def test_one_settlement_stands_until_it_is_ruled_out_or_nobody_asks(asks: list[tuple[str, set[str], float]]) -> None:
    table, now, standing, last = Settlements(), 0.0, "", float("-inf")
    for proposed, ruled_out, pause in asks:
        now += pause
        found = table.of(MODEL_A, ruled_out=frozenset(map(InstanceName, ruled_out)), now=now)
        expected = standing if standing and standing not in ruled_out and last + LASTS > now else None
        assert found == expected
        standing, last = found or proposed, now
        table.settle(MODEL_A, InstanceName(standing), now=now)
        table.check_integrity()


def test_settlements_of_models_that_nobody_asks_for_any_more_are_forgotten() -> None:
    table = Settlements()
    for i in range(100):
        table.settle(NamespacedName("default", f"m{i}"), InstanceName("p"), now=i * 0.1)
    assert len(table) <= LASTS / 0.1 + 1
