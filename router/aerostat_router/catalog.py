"""What is declared: models by the name that clients use, their SLOs and pools, and where the agents of the instances listen.

Existence of a model is a fact of its `Model` object, never of what happens to run. Fed by the Cluster watch; it survives
outages of it with what it last knew.
"""

from collections.abc import Callable, Iterator
from typing import Final

from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.resources import (
    BEST_EFFORT,
    Resource,
    name_of,
    parse_conditions,
    parse_instance,
    parse_instance_status,
    parse_model,
    parse_pool,
    parse_slo,
)
from aerostat_core.specs import InstanceSpec, Model, Pool, SloTargets
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent

WATCHED: Final = (Kind.SLO, Kind.POOL, Kind.MODEL, Kind.INSTANCE)


class Catalog:
    """Mutable. `on_change` is called after each change that may concern a held call or an agent's address."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._synced: set[Kind] = set()
        self._models: dict[NamespacedName, Model] = {}
        self._problems: dict[NamespacedName, str] = {}
        self._by_served_name: dict[str, Model] = {}
        self._slos: dict[NamespacedName, SloTargets] = {}
        self._pools: dict[NamespacedName, Pool] = {}
        self._instances: dict[NamespacedName, InstanceSpec] = {}
        self._addresses: dict[NamespacedName, str] = {}

    @property
    def is_synced(self) -> bool:
        return self._synced.issuperset(WATCHED)

    def apply(self, event: WatchEvent) -> None:
        if event.resource is None:
            self._synced.add(event.kind)
        elif event.change is Change.DELETED:
            self._delete(event.kind, name_of(event.resource))
        else:
            self._put(event.kind, event.resource)
        self._on_change()

    # Questions.

    def model(self, served_name: str) -> Model | None:
        return self._by_served_name.get(served_name)

    def model_of(self, name: NamespacedName) -> Model | None:
        return self._models.get(name)

    def models(self) -> Iterator[Model]:
        """By served name."""
        for served_name in sorted(self._by_served_name):
            yield self._by_served_name[served_name]

    def served_names(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_served_name))

    def slo(self, model: Model) -> SloTargets:
        return self._slos.get(model.name.sibling(model.slo), BEST_EFFORT) if model.slo is not None else BEST_EFFORT

    def why_unplaced(self, model: Model) -> str | None:
        """The operator's own words for why it is not placed as it is declared; None while it has not said that. It may run all the same."""
        return self._problems.get(model.name)

    def lease_ttl(self, instance: NamespacedName) -> Seconds | None:
        spec = self._instances.get(instance)
        return spec.lease_ttl if spec is not None else None

    def replica_penalty(self, instance: NamespacedName) -> Seconds:
        spec = self._instances.get(instance)
        pool = self._pools.get(instance.sibling(spec.pool)) if spec is not None else None
        return pool.routing.replica_penalty if pool is not None else 0.0

    def instances(self) -> frozenset[NamespacedName]:
        return frozenset(self._instances)

    def address(self, instance: NamespacedName) -> str | None:
        return self._addresses.get(instance)

    def addresses(self) -> frozenset[str]:
        return frozenset(self._addresses.values())

    # Inside.

    def _put(self, kind: Kind, resource: Resource) -> None:
        name = name_of(resource)
        if kind is Kind.MODEL:
            self._put_model(name, resource)
        elif kind is Kind.SLO:
            slo = parse_slo(resource)
            self._slos[name] = SloTargets(ttft=slo.ttft, tpot=slo.tpot, hold_budget=slo.hold_budget)
        elif kind is Kind.POOL:
            self._pools[name] = parse_pool(resource)
        elif kind is Kind.INSTANCE:
            self._instances[name] = parse_instance(resource)
            address = parse_instance_status(resource).agent_address
            if address:
                self._addresses[name] = address

    def _put_model(self, name: NamespacedName, resource: Resource) -> None:
        model = parse_model(resource)
        self._models[name] = model
        scheduled = next((c for c in parse_conditions(resource.get("status", {})) if c.type == "Scheduled"), None)
        if scheduled is not None and scheduled.status == "False" and scheduled.observed_generation >= model.generation:
            self._problems[name] = f"{scheduled.reason}: {scheduled.message}" if scheduled.message else scheduled.reason
        else:
            self._problems.pop(name, None)
        self._index()

    def _delete(self, kind: Kind, name: NamespacedName) -> None:
        if kind is Kind.MODEL:
            self._models.pop(name, None)
            self._problems.pop(name, None)
            self._index()
        elif kind is Kind.SLO:
            self._slos.pop(name, None)
        elif kind is Kind.POOL:
            self._pools.pop(name, None)
        elif kind is Kind.INSTANCE:
            self._instances.pop(name, None)
            self._addresses.pop(name, None)

    def _index(self) -> None:
        """Of two models that want the same served name the older one has it, then the first by name."""
        self._by_served_name = {}
        for model in sorted(self._models.values(), key=lambda m: (m.created_at, m.name)):
            if not model.deleting:
                self._by_served_name.setdefault(model.served_name, model)
