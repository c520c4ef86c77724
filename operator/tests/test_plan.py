"""The whole plan, from objects as users write them: what Instances become and what statuses say."""

from typing import Any

import pytest

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_core.specs import Condition, EngineState, InstanceSpec
from aerostat_operator.builders import instance_resource, model_status_resource, pool_status_resource, slo_status_resource
from aerostat_operator.mirror import Key
from aerostat_operator.policy.plan import Plan, plan
from aerostat_operator.policy.rollup import STALLED_AFTER
from aerostat_operator.policy.statuses import ModelStatus, find, format_time
from aerostat_operator.policy.world import AGENT_SILENT_AFTER, Learned
from aerostat_operator.reading import read_world
from aerostat_operator.writes import writes_of
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.port import Kind

pytestmark = pytest.mark.cpu
START = 1_800_000_000.0
ADMISSION = Admission.of_this_build()


class Cell:
    """A cluster in a value: objects with schema and defaults applied, plans carried out, agents that do as told."""

    def __init__(self) -> None:
        self.objects: dict[Key, Resource] = {}
        self.learned = Learned()
        self.now = START
        self.node("node1")

    def put(self, kind: Kind, name: str, *, created: int = 0, labels: dict[str, str] | None = None, **spec: Any) -> None:
        resource = {
            "apiVersion": "aerostat.dev/v1alpha1",
            "kind": kind.value,
            "metadata": {"name": name, "namespace": "default", "labels": labels or {}},
            "spec": spec,
        }
        key = (kind, NamespacedName("default", name))
        old = self.objects.get(key)
        admitted = ADMISSION.admit(resource, old)
        generation = 1 if old is None else old["metadata"]["generation"] + (old["spec"] != admitted["spec"])
        stamps = {"uid": f"uid-{name}", "generation": generation, "creationTimestamp": format_time(START + created)}
        status = {"status": old["status"]} if old is not None and "status" in old else {}
        self.objects[key] = {**admitted, "metadata": {**admitted["metadata"], **stamps}, **status}

    def pool(self, name: str = "cpu", memory: str = "1Gi", **spec: Any) -> None:
        devices = {"kind": "CPU", "count": spec.pop("count", 1), "memory": memory}
        self.put(Kind.POOL, name, created=spec.pop("created", 0), labels=spec.pop("labels", None), devices=devices, **spec)

    def model(self, name: str, *, created: int = 0, kv: str = "100Mi", weights: str | None = "100Mi", **spec: Any) -> None:
        memory = {"kvMin": kv} | ({"weights": weights} if weights else {})
        where = {} if "poolSelector" in spec else {"pool": "cpu"}
        self.put(Kind.MODEL, name, created=created, **({"source": {"uri": "pypi://m@1"}, "memory": memory} | where | spec))

    def node(self, name: str, *, ready: bool = True, cordoned: bool = False) -> None:
        self.objects[Kind.NODE, NamespacedName("default", name)] = {
            "kind": "Node",
            "metadata": {"name": name, "namespace": "default", "labels": {}},
            "spec": {"unschedulable": cordoned},
            "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
        }

    def remove(self, kind: Kind, name: str) -> None:
        del self.objects[kind, NamespacedName("default", name)]

    def step(self) -> Plan:
        """One plan, carried out."""
        decided = plan(read_world(self.objects), self.learned, now=self.now, url="http://router/v1")
        self.learned = decided.learned
        for spec in decided.instances:
            status = self.objects.get((Kind.INSTANCE, spec.name), {}).get("status")
            made = instance_resource(spec, owner_uid=self.objects[Kind.POOL, spec.name.sibling(spec.pool)]["metadata"].get("uid", ""))
            self.objects[Kind.INSTANCE, spec.name] = ADMISSION.admit(made, None) | ({"status": status} if status else {})
        for name in decided.obsolete:
            del self.objects[Kind.INSTANCE, name]
        statuses = [
            *((Kind.MODEL, s.name, model_status_resource(s)) for s in decided.models),
            *((Kind.POOL, s.name, pool_status_resource(s)) for s in decided.pools),
            *((Kind.SLO, s.name, slo_status_resource(s)) for s in decided.slos),
        ]
        for kind, name, status in statuses:
            ADMISSION.check_status(kind, name, status)
            self.objects[kind, name] = {**self.objects[kind, name], "status": status}
        return decided

    def agents(self, state: str = "Open", *, only: str | None = None, **figures: Any) -> None:
        """Every agent reports all its models in a state."""
        for (kind, name), resource in list(self.objects.items()):
            if kind is not Kind.INSTANCE:
                continue
            before = {m["name"]: m for m in resource.get("status", {}).get("models", ())}
            models = [
                before.get(m["name"], {"name": m["name"], "state": "Absent"})
                if only not in (None, m["name"])
                else {"name": m["name"], "generation": m["generation"], "state": state, **figures}
                for m in resource["spec"]["models"]
            ]
            status = {
                "agentEpoch": 1,
                "heartbeat": format_time(self.now),
                "agentAddress": "h:1",
                "models": models,
            }
            self.objects[kind, name] = {**resource, "status": status}

    def settle(self, **figures: Any) -> Plan:
        self.step()
        self.agents(**figures)
        return self.step()


def model_of(decided: Plan, name: str) -> ModelStatus:
    return next(m for m in decided.models if m.name.name == name)


def cond(decided: Plan, name: str, kind: str) -> Condition:
    found = find(model_of(decided, name).conditions, kind)
    assert found is not None, f"{name} has no condition {kind}"
    return found


def entries(decided: Plan) -> dict[str, list[str]]:
    return {spec.name.name: [m.name for m in spec.models] for spec in decided.instances}


def instance(decided: Plan, name: str) -> InstanceSpec:
    return next(spec for spec in decided.instances if spec.name.name == name)


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
        assert "generation 2 does not run yet on cpu-node1-0" in ready.message
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
