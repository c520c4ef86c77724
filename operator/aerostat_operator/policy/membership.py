"""Which nodes belong to which pool, and the instances that each pool gets of them.

A node that two pools select goes to the older one (references of a device cannot be shared), the other one is told.
Names are deterministic, so that a later run, and a retry, know their own children.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from aerostat_core.ids import Bytes, InstanceName, NamespacedName, NodeName
from aerostat_core.specs import DeviceKind, Node, Pool

NAME_LIMIT = 63  # an instance's name is also a label's value
HASH_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One instance that a pool has: `devicesPerInstance` devices of one node."""

    name: NamespacedName
    node: NodeName
    devices: tuple[int, ...]
    device_bytes: Bytes
    cordoned: bool = False  # no new sessions, models leave as soon as others are ready
    lost: bool = False  # its node is not ready: nobody answers for it now

    @property
    def instance(self) -> InstanceName:
        return InstanceName(self.name.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """`conflicts`: node and the older pool that has it. `bare`: selected nodes without devices. `leftover`: unused devices."""

    pool: Pool
    members: tuple[Member, ...] = ()
    nodes: tuple[NodeName, ...] = ()
    conflicts: tuple[tuple[NodeName, NamespacedName], ...] = ()
    bare: tuple[NodeName, ...] = ()
    leftover: tuple[tuple[NodeName, int], ...] = ()
    devices_per_node: int = 0  # of the largest node

    @property
    def accepting(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if not (m.cordoned or m.lost))


def assign_members(pools: Sequence[Pool], nodes: Sequence[Node]) -> dict[NamespacedName, Membership]:
    """Memberships by pool. The order of pools and nodes does not matter."""
    owners: dict[NodeName, NamespacedName] = {}
    taken: set[NamespacedName] = set()
    memberships = {}
    for pool in sorted(pools, key=lambda p: (p.created_at, p.name)):
        matching = [n for n in sorted(nodes, key=lambda n: n.name) if _selects(pool, n)]
        conflicts = tuple((n.name, owners[n.name]) for n in matching if n.name in owners)
        own = [n for n in matching if n.name not in owners]
        owners |= {n.name: pool.name for n in own}
        memberships[pool.name] = _divide(pool, own, conflicts, taken)
    return memberships


def _selects(pool: Pool, node: Node) -> bool:
    return pool.node_selector.items() <= node.labels.items()


def _divide(
    pool: Pool, nodes: Sequence[Node], conflicts: tuple[tuple[NodeName, NamespacedName], ...], taken: set[NamespacedName]
) -> Membership:
    members: list[Member] = []
    bare, leftover, largest = [], [], 0
    for node in nodes:
        count, device_bytes = _devices_of(pool, node)
        size, largest = pool.devices_per_instance, max(largest, count)
        if count == 0 or device_bytes == 0:
            bare.append(node.name)
            continue
        for k in range(count // size):
            name = _instance_name(pool.name, node.name, k, taken)
            taken.add(name)
            devices = tuple(range(k * size, (k + 1) * size))
            state = {"cordoned": not node.schedulable, "lost": not node.ready}
            members.append(Member(name=name, node=node.name, devices=devices, device_bytes=device_bytes, **state))
        if count % size:
            leftover.append((node.name, count % size))
    return Membership(
        pool=pool,
        members=tuple(members),
        nodes=tuple(n.name for n in nodes),
        conflicts=conflicts,
        bare=tuple(bare),
        leftover=tuple(leftover),
        devices_per_node=largest,
    )


def _devices_of(pool: Pool, node: Node) -> tuple[int, Bytes]:
    """Devices of a node and the bytes of each. On the CPU device the pool sets both, since a node cannot say them."""
    if pool.devices.kind is DeviceKind.CPU:
        return pool.devices.count, pool.devices.memory_bytes
    return node.device_count or pool.devices.count, node.device_bytes or pool.devices.memory_bytes


def _instance_name(pool: NamespacedName, node: NodeName, k: int, taken: set[NamespacedName]) -> NamespacedName:
    """`{pool}-{node}-{k}`. Where that is too long, or another pool's already (`a-b` + `c` and `a` + `b-c`), a hash tells them apart."""
    plain = pool.sibling(f"{pool.name}-{node}-{k}")
    if len(plain.name) <= NAME_LIMIT and plain not in taken:
        return plain
    digest = sha256(f"{pool}/{node}".encode()).hexdigest()[:HASH_CHARS]
    tail = f"-{digest}-{k}"
    head = f"{pool.name}-{node}"[: NAME_LIMIT - len(tail)].rstrip("-.")
    return pool.sibling(head + tail)
