"""Nodes to pools, devices to instances, names that are the same on every run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerostat_core.ids import NamespacedName, NodeName
from aerostat_core.specs import (
    DemandDefinition,
    DeviceKind,
    Devices,
    Node,
    PlacementSettings,
    Pool,
    PoolMode,
    RoutingSettings,
    Sharing,
)
from aerostat_operator.policy.membership import NAME_LIMIT, assign_members

pytestmark = pytest.mark.cpu


def node(name: str, *, gpus: int = 0, schedulable: bool = True, ready: bool = True, labels: dict[str, str] | None = None) -> Node:
    return Node(
        name=NodeName(name), labels=labels or {}, schedulable=schedulable, ready=ready, device_count=gpus, device_bytes=gpus and 80 * 2**30
    )


def pool(
    name: str,
    *,
    created: str = "2026-01-01T00:00:00Z",
    kind: DeviceKind = DeviceKind.CPU,
    count: int = 1,
    size: int = 1,
    selector: dict[str, str] | None = None,
) -> Pool:
    return Pool(
        name=NamespacedName("default", name),
        uid=name,
        generation=1,
        labels={},
        created_at=created,
        mode=PoolMode.COLD,
        sharing=Sharing.CONCURRENT,
        node_selector=selector or {},
        devices=Devices(kind=kind, count=count, memory_bytes=2**30 if count else 0, reserve_bytes=0),
        devices_per_instance=size,
        allow_remote_code=False,
        host_pool_bytes=0,
        idle_time=300.0,
        placement=PlacementSettings(demand=DemandDefinition.TOKEN_RATE, hysteresis=0.1, max_moves_per_cycle=1),
        routing=RoutingSettings(lease_ttl=1.0, memory_price=0.0, replica_penalty=0.5),
    )


def names(pools: list[Pool], nodes: list[Node], of: Pool) -> list[str]:
    return [m.name.name for m in assign_members(pools, nodes)[of.name].members]


def test_instances_are_named_after_pool_node_and_number() -> None:
    p = pool("cpu-pool", count=2)
    assert names([p], [node("node1")], p) == ["cpu-pool-node1-0", "cpu-pool-node1-1"]


def test_a_node_of_two_pools_goes_to_the_older_and_the_other_is_told() -> None:
    old, young = pool("z", created="2026-01-01T00:00:00Z"), pool("a", created="2026-02-01T00:00:00Z")
    memberships = assign_members([young, old], [node("n")])
    assert [m.node for m in memberships[old.name].members] == ["n"]
    assert memberships[young.name].members == ()
    assert memberships[young.name].conflicts == (("n", old.name),)


def test_a_pool_takes_only_the_nodes_with_its_labels() -> None:
    p = pool("p", selector={"zone": "a"})
    assert names([p], [node("x", labels={"zone": "a"}), node("y", labels={"zone": "b"}), node("w")], p) == ["p-x-0"]


def test_devices_are_grouped_and_the_rest_is_reported() -> None:
    p = pool("gpu", kind=DeviceKind.CUDA, count=0, size=2)
    membership = assign_members([p], [node("n", gpus=5), node("bare")])[p.name]
    assert [m.devices for m in membership.members] == [(0, 1), (2, 3)]
    assert membership.members[0].device_bytes == 80 * 2**30
    assert membership.leftover == (("n", 1),)
    assert membership.bare == ("bare",)
    assert membership.devices_per_node == 5


def test_a_cpu_pool_does_not_count_the_nodes_gpus() -> None:
    p = pool("cpu", count=1)
    assert len(names([p], [node("n", gpus=8)], p)) == 1


def test_instances_of_cordoned_and_lost_nodes_are_marked() -> None:
    p = pool("p")
    membership = assign_members([p], [node("a"), node("b", schedulable=False), node("c", ready=False)])[p.name]
    assert [(m.cordoned, m.lost) for m in membership.members] == [(False, False), (True, False), (False, True)]
    assert [m.node for m in membership.accepting] == ["a"]


def test_pools_whose_plain_names_collide_get_distinct_instances() -> None:
    first, second = pool("a-b", created="1", selector={"zone": "x"}), pool("a", created="2", selector={"zone": "y"})
    pools, nodes = [first, second], [node("c", labels={"zone": "x"}), node("b-c", labels={"zone": "y"})]
    assert names(pools, nodes, first) == ["a-b-c-0"]
    (hashed,) = names(pools, nodes, second)
    assert hashed.startswith("a-b-c-")
    assert hashed != "a-b-c-0"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.text("ab-", min_size=1, max_size=40), st.integers(1, 3)), unique_by=lambda p: p[0], min_size=1, max_size=3),
    st.lists(st.text("ab.-", min_size=1, max_size=120), unique=True, min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_names_are_unique_short_and_the_same_in_any_order(pools: list[tuple[str, int]], nodes: list[str], random: object) -> None:
    # A real name starts and ends with a letter; each pool has the nodes of its own label.
    made = [pool(f"p{name}p", count=size, created=str(k), selector={f"k{k}": "v"}) for k, (name, size) in enumerate(pools)]
    all_nodes = [node(f"n{name}n", labels={f"k{i % len(made)}": "v"}) for i, name in enumerate(nodes)]
    memberships = assign_members(made, all_nodes)
    found = [m.name for membership in memberships.values() for m in membership.members]
    assert len(found) == len(set(found))
    assert all(len(n.name) <= NAME_LIMIT and n.name[-1].isalnum() for n in found)
    random.shuffle(made)  # type: ignore[attr-defined]
    random.shuffle(all_nodes)  # type: ignore[attr-defined]
    assert assign_members(made, all_nodes) == memberships
