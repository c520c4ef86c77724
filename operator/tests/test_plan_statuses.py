"""What statuses, conditions and events say of a plan and of what agents report."""

import pytest

from aerostat_operator.policy.rollup import STALLED_AFTER
from aerostat_operator.policy.statuses import find, format_time
from aerostat_operator.policy.world import AGENT_SILENT_AFTER
from aerostat_operator.writes import writes_of
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.operator_cell import START, Cell, cond, entries, instance, model_of

pytestmark = pytest.mark.cpu


def test_a_model_whose_earlier_declaration_still_serves_is_available_and_not_ready() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m")
    cell.settle()
    cell.model("m", kv="50Mi")
    for decided in (cell.step(), cell.step()):
        assert cond(decided, "m", "Available").status == "True"
        ready = cond(decided, "m", "Ready")
        assert (ready.status, ready.reason, ready.observed_generation) == ("False", "Updating", 2)
        assert "what is declared now does not run yet on cpu-node1-0" in ready.message
    cell.agents()
    assert cond(cell.step(), "m", "Ready").status == "True"


def test_a_model_that_sleeps_is_ready_and_available() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m", minReplicas=0)
    decided = cell.settle(state="Absent")
    assert not instance(decided, "cpu-node1-0").models[0].resident
    assert (cond(decided, "m", "Ready").status, cond(decided, "m", "Ready").reason) == ("True", "ScaledToZero")
    assert cond(decided, "m", "Available").status == "True"
    assert find(model_of(decided, "m").conditions, "Loaded") is None
    assert model_of(decided, "m").instances == "0/0"
    cell.agents(state="Starting")
    assert model_of(cell.step(), "m").instances == "0/1"
    cell.agents(state="Open")
    decided = cell.step()
    assert (model_of(decided, "m").instances, cond(decided, "m", "Ready").reason) == ("1/1", "Ready")


def test_a_failed_engine_stalls_its_model_with_the_logs_last_lines() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m")
    decided = cell.settle(state="Failed", reason="SourceNotFound", message="no such file: /models/x")
    for kind, status in (("Ready", "False"), ("Loaded", "False"), ("Available", "False"), ("Stalled", "True")):
        c = cond(decided, "m", kind)
        assert (c.status, c.reason) == (status, "SourceNotFound"), kind
        assert "no such file: /models/x" in c.message
    assert cond(decided, "m", "Progressing").status == "False"


def test_what_is_not_ready_for_minutes_is_stalled_and_recovers() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m")
    decided = cell.settle(state="Starting", progress="fetching 12 %")
    assert "fetching 12 %" in cond(decided, "m", "Loaded").message
    assert find(model_of(decided, "m").conditions, "Stalled") is None
    cell.now += STALLED_AFTER
    cell.agents(state="Starting", progress="fetching 12 %")
    decided = cell.step()
    assert cond(decided, "m", "Stalled").status == "True"
    assert cond(decided, "m", "Ready").last_transition_time == format_time(START)
    cell.agents()
    decided = cell.step()
    assert find(model_of(decided, "m").conditions, "Stalled") is None
    assert cond(decided, "m", "Ready").last_transition_time == format_time(cell.now)


def test_an_instance_whose_agent_is_silent_is_not_available() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m")
    cell.settle()
    cell.now += AGENT_SILENT_AFTER + 1
    decided = cell.step()
    assert cond(decided, "m", "Available").reason == "AgentSilent"
    assert decided.pools[0].instances == "0/1"
    heard = "0 of 1 instances accept models; nothing is heard from the agents of cpu-node1-0"
    assert decided.pools[0].conditions[0].message == heard
    assert entries(decided) == {"cpu-node1-0": ["m"]}  # silence alone moves nothing


def test_a_cordoned_node_that_is_the_only_one_says_where_to_look_and_that_its_engine_ends() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m")
    cell.settle()
    cell.node("node1", cordoned=True)
    cell.step()
    cell.agents(state="Draining")
    decided = cell.step()
    assert cond(decided, "m", "Scheduled").message == "the pool has no instance that accepts models: its own conditions say why"
    assert cond(decided, "m", "Loaded").message == "its engine ends on cpu-node1-0"


def test_a_pool_without_a_node_says_which_labels_it_looks_for() -> None:
    cell = Cell()
    cell.pool(nodeSelector={"tier": "hot", "a": "b"})
    assert cell.step().pools[0].conditions[0].message == "no node has the labels of spec.nodeSelector (a=b,tier=hot)"


@pytest.mark.parametrize(
    ("replicas", "reported", "is_warning"),
    [
        (0, {"state": "Starting", "reason": "EngineStarting"}, False),
        (0, {"state": "Failed", "reason": "SourceNotFound"}, True),
        (1, {"state": "Draining"}, False),
        (1, {"state": "Failed", "reason": "EngineFailed"}, True),
    ],
)
def test_a_model_that_is_called_awake_or_taken_away_warns_nobody_and_one_that_fails_does(
    replicas: int, reported: dict[str, str], is_warning: bool
) -> None:
    cell = Cell()
    cell.pool()
    cell.model("m", minReplicas=replicas)
    cell.settle(state="Open" if replicas else "Absent")
    cell.agents(**reported)
    before = dict(cell.objects)
    (write,) = (w for w in writes_of(cell.step(), before) if w.kind is Kind.MODEL)
    assert write.notes[0].warning is is_warning
