"""The whole plan, from objects as users write them: what Instances become."""

from typing import Any

import pytest

from aerostat_core.ids import NamespacedName
from aerostat_core.specs import EngineState
from aerostat_operator.policy.statuses import find
from aerostat_operator.writes import writes_of
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.operator_cell import Cell, cond, entries, instance, model_of

pytestmark = pytest.mark.cpu


def test_a_served_model_is_ready_and_says_where() -> None:
    cell = Cell()
    cell.pool()
    cell.put(Kind.SLO, "chat", ttft="800ms", tpot="100ms")
    cell.model("m", slo="chat")
    decided = cell.settle(ttftP95Seconds=0.31)
    status = model_of(decided, "m")
    assert entries(decided) == {"cpu-node1-0": ["m"]}
    assert [(c.type, c.status) for c in status.conditions] == [
        ("Ready", "True"),
        ("Scheduled", "True"),
        ("Loaded", "True"),
        ("Available", "True"),
        ("Progressing", "False"),
    ]
    assert (status.state, status.instances, status.ttft, status.url) == (EngineState.OPEN, "1/1", "310ms / 800ms", "http://router/v1")
    assert [p.instance for p in status.placements] == ["cpu-node1-0"]


def test_a_plan_carried_out_plans_nothing_more() -> None:
    cell = Cell()
    cell.pool(count=2)
    for i in range(3):
        cell.model(f"m{i}")
    cell.settle()
    before = dict(cell.objects)
    cell.now += 20
    decided = cell.step()
    assert writes_of(decided, before) == []


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"pool": "nope"}, "PoolNotFound", "'nope'"),
        ({"poolSelector": {"matchLabels": {"tier": "x"}}}, "PoolNotFound", "tier=x"),
        ({"slo": "nope"}, "SLONotFound", "'nope'"),
        ({"tensorParallel": 2}, "TensorParallelMismatch", "devicesPerInstance 1"),
        ({"tensorParallel": 4}, "NotSupported", "multi-node"),
        ({"trustRemoteCode": True}, "RemoteCodeNotAllowed", "allowRemoteCode"),
        ({"engineArgs": {"model-path": "/etc"}}, "EngineArgsRejected", "model-path"),
        ({"memory": {"weights": "5Gi", "kvMin": "1Mi"}}, "InsufficientMemory", "5.001Gi per device, 1Gi of 1Gi are free on cpu-node1-0"),
    ],
)
def test_what_cannot_be_placed_says_why(spec: dict[str, Any], reason: str, words: str) -> None:
    cell = Cell()
    cell.pool(count=2)
    cell.model("m", **spec)
    decided = cell.step()
    scheduled = cond(decided, "m", "Scheduled")
    assert (scheduled.status, scheduled.reason) == ("False", reason)
    assert words in scheduled.message
    assert cond(decided, "m", "Ready").reason == reason
    assert cond(decided, "m", "Available").status == "False"
    assert entries(decided) == {"cpu-node1-0": [], "cpu-node1-1": []}


def test_a_missing_reference_heals_when_it_appears() -> None:
    cell = Cell()
    cell.model("m", slo="chat")
    assert cond(cell.step(), "m", "Scheduled").reason == "PoolNotFound"
    cell.pool()
    assert cond(cell.step(), "m", "Scheduled").reason == "SLONotFound"
    cell.put(Kind.SLO, "chat", ttft="800ms", tpot="100ms")
    assert cond(cell.settle(), "m", "Ready").status == "True"


def test_the_younger_of_two_models_with_one_served_name_is_refused() -> None:
    cell = Cell()
    cell.pool()
    cell.model("young", created=10, servedName="Chat-1.0")
    cell.model("zold", created=5, servedName="Chat-1.0")
    decided = cell.step()
    assert cond(decided, "young", "Scheduled").reason == "ServedNameConflict"
    assert "default/zold" in cond(decided, "young", "Scheduled").message
    assert cond(decided, "zold", "Scheduled").status == "True"


def test_a_pool_of_rounds_says_what_to_set_and_keeps_what_runs() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m")
    cell.settle()
    cell.pool(sharing="Rounds")
    decided = cell.step()
    ready = find(decided.pools[0].conditions, "Ready")
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", "SharingNotSupported")
    assert "Concurrent" in ready.message
    assert cond(decided, "m", "Scheduled").reason == "SharingNotSupported"
    assert cond(decided, "m", "Available").status == "True"
    assert entries(decided) == {"cpu-node1-0": ["m"]}


def test_a_bad_edit_keeps_the_accepted_version_running() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m")
    cell.settle()
    cell.model("m", slo="gone", kv="200Mi")
    decided = cell.step()
    assert cond(decided, "m", "Ready").reason == "SLONotFound"
    assert cond(decided, "m", "Available").status == "True"
    assert instance(decided, "cpu-node1-0").models[0].kv_floor_bytes == 100 * 2**20


def test_revoked_remote_code_stops_at_once() -> None:
    cell = Cell()
    cell.pool(allowRemoteCode=True)
    cell.model("m", trustRemoteCode=True)
    assert entries(cell.settle()) == {"cpu-node1-0": ["m"]}
    cell.pool(allowRemoteCode=False)
    assert entries(cell.step()) == {"cpu-node1-0": []}


def test_a_change_of_replicas_or_slo_restarts_no_engine() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m")
    cell.settle()
    cell.put(Kind.SLO, "chat", ttft="800ms", tpot="100ms")
    cell.model("m", slo="chat", maxReplicas=3)
    decided = cell.step()
    assert instance(decided, "cpu-node1-0").models[0].generation == 1
    assert instance(decided, "cpu-node1-0").models[0].slo.ttft == 0.8
    assert model_of(decided, "m").generation == 2
    cell.model("m", slo="chat", maxReplicas=3, engineArgs={"random-seed": "7"})
    decided = cell.step()
    assert instance(decided, "cpu-node1-0").models[0].generation == 3
    assert cond(decided, "m", "Progressing").reason == "Updating"


def test_unknown_weights_are_placed_in_good_hope_and_looked_at_again() -> None:
    cell = Cell()
    cell.pool()
    cell.model("a", created=1)
    cell.model("big", created=2, weights=None)
    decided = cell.step()
    assert entries(decided) == {"cpu-node1-0": ["a", "big"]}
    cell.agents(only="a")
    cell.agents(state="Starting", only="big", weightsBytes=950 * 2**20)
    decided = cell.step()
    assert entries(decided) == {"cpu-node1-0": ["a"]}
    assert cond(decided, "big", "Scheduled").message.startswith("weights 950Mi + KV 100Mi")
    assert entries(cell.step()) == {"cpu-node1-0": ["a"]}, "what was measured is remembered"


def test_a_cordoned_node_drains_after_its_models_run_elsewhere() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m")
    cell.settle()
    cell.node("node2")
    cell.node("node1", cordoned=True)
    decided = cell.step()
    assert instance(decided, "cpu-node1-0").draining
    assert entries(decided) == {"cpu-node1-0": ["m"], "cpu-node2-0": ["m"]}
    cell.agents()
    decided = cell.step()
    assert entries(decided) == {"cpu-node1-0": [], "cpu-node2-0": ["m"]}
    assert cond(decided, "m", "Ready").status == "True"


def test_a_node_that_is_gone_takes_its_instance_along() -> None:
    cell = Cell()
    cell.pool()
    cell.node("node2")
    cell.model("m", minReplicas=2, maxReplicas=2)
    cell.settle()
    cell.remove(Kind.NODE, "node2")
    decided = cell.step()
    assert [n.name for n in decided.obsolete] == ["cpu-node2-0"]
    assert cond(decided, "m", "Scheduled").reason == "NotEnoughInstances"
    assert model_of(decided, "m").instances == "1/2"


def test_deleting_a_model_or_a_pool_removes_what_was_made_for_it() -> None:
    cell = Cell()
    cell.pool()
    cell.model("m")
    cell.model("n")
    cell.settle()
    cell.remove(Kind.MODEL, "m")
    assert entries(cell.step()) == {"cpu-node1-0": ["n"]}
    cell.remove(Kind.POOL, "cpu")
    decided = cell.step()
    assert [n.name for n in decided.obsolete] == ["cpu-node1-0"]
    assert cond(decided, "n", "Scheduled").reason == "PoolNotFound"


def test_a_model_that_changes_its_pool_is_served_until_the_new_pool_serves_it() -> None:
    cell = Cell()
    cell.pool(nodeSelector={})
    cell.model("m")
    cell.settle()
    cell.node("node2")
    cell.objects[Kind.NODE, NamespacedName("default", "node2")]["metadata"]["labels"] = {"zone": "b"}
    cell.objects[Kind.NODE, NamespacedName("default", "node1")]["metadata"]["labels"] = {"zone": "a"}
    cell.pool(nodeSelector={"zone": "a"})
    cell.pool("other", nodeSelector={"zone": "b"})
    cell.model("m", pool="other")
    assert entries(cell.step()) == {"cpu-node1-0": ["m"], "other-node2-0": ["m"]}
    cell.agents()
    decided = cell.step()
    assert entries(decided) == {"cpu-node1-0": [], "other-node2-0": ["m"]}
    assert model_of(decided, "m").pool == "other"


def test_an_object_that_cannot_be_read_leaves_all_others_and_its_own_replicas_alone() -> None:
    cell = Cell()
    cell.pool()
    cell.model("bad")
    cell.model("good")
    cell.settle()
    cell.objects[Kind.MODEL, NamespacedName("default", "bad")]["spec"]["memory"]["kvMin"] = "lots"
    decided = cell.step()
    assert entries(decided) == {"cpu-node1-0": ["bad", "good"]}
    assert cond(decided, "good", "Ready").status == "True"
    assert [(s.name.name, s.conditions[0].reason) for s in decided.invalid] == [("bad", "Invalid")]


def test_demand_asks_for_replicas_while_the_objective_is_missed_and_gives_them_back_when_idle() -> None:
    cell = Cell()
    cell.pool(count=3)
    cell.put(Kind.SLO, "chat", ttft="800ms", tpot="100ms", objectivePercent=90)
    cell.model("m", slo="chat", maxReplicas=2)
    missed: dict[str, Any] = {"attainment": 0.5, "requestsPerSecond": 3.0, "tokensPerSecond": 60.0}
    decided = cell.settle(**missed)
    assert sum("m" in models for models in entries(decided).values()) == 2
    assert model_of(decided, "m").instances == "1/2"
    cell.agents(**missed)
    assert sum("m" in models for models in entries(cell.step()).values()) == 2, "never beyond maxReplicas"
    cell.agents(requestsPerSecond=0.0)
    assert sum("m" in models for models in entries(cell.step()).values()) == 1


def test_pressed_instances_hand_a_model_over_without_a_gap() -> None:
    """Two busy models share an instance while another is empty: one moves, and at every step one replica is open."""
    cell = Cell()
    cell.pool()
    for name in ("a", "b"):
        cell.model(name)
    cell.settle()
    cell.node("node2")
    busy: dict[str, Any] = {"tokensPerSecond": 100.0, "kvBytesPerToken": 1000, "requestsPerSecond": 1.0}
    cell.agents(**busy)
    decided = cell.step()
    assert entries(decided) == {"cpu-node1-0": ["a", "b"], "cpu-node2-0": ["a"]}
    assert cond(decided, "a", "Progressing").reason == "Moving"
    assert cond(decided, "a", "Ready").status == "True"
    cell.agents(only="b", **busy)
    assert entries(cell.step()) == {"cpu-node1-0": ["a", "b"], "cpu-node2-0": ["a"]}
    cell.agents(**busy)
    decided = cell.step()
    assert entries(decided) == {"cpu-node1-0": ["b"], "cpu-node2-0": ["a"]}
    assert cond(decided, "a", "Ready").status == "True"
