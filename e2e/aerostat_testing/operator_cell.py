"""A whole cluster in a value, for tests of the operator's plan: objects as users write them, agents that do as told."""

from typing import Any

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_core.specs import Condition, InstanceSpec
from aerostat_operator.builders import instance_resource, model_status_resource, pool_status_resource, slo_status_resource
from aerostat_operator.mirror import Key
from aerostat_operator.policy.plan import Plan, plan
from aerostat_operator.policy.statuses import ModelStatus, find, format_time
from aerostat_operator.policy.world import Learned
from aerostat_operator.reading import read_world
from aerostat_runtime.cluster.admission import Admission
from aerostat_runtime.cluster.port import Kind

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
