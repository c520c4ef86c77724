"""The memory check: what fits, and what a refusal says."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_agent.keeper.container import CGROUP_V1, CGROUP_V2, memory_of_container
from aerostat_agent.policy.memory import (
    MIN_SLACK_SHARE,
    ContainerMemory,
    Footprint,
    kv_tokens,
    memory_price,
    refuse,
    refuse_node,
    used_bytes,
)
from aerostat_core.ids import NamespacedName, PoolName
from aerostat_core.specs import DeviceKind, InstanceSpec
from aerostat_testing.agent_fakes import instance_spec

pytestmark = pytest.mark.cpu

size = st.integers(0, 1 << 40)
footprint = st.builds(Footprint, weights=size, reserve=size, kv=size)


@given(footprint, st.lists(footprint, max_size=5), size)
def test_what_is_not_refused_fits_and_what_is_refused_does_not(asked: Footprint, held: list[Footprint], capacity: int) -> None:
    refusal = refuse(asked, held, capacity)
    assert (refusal is None) == (used_bytes([*held, asked]) <= capacity)
    if refusal is not None:
        assert (refusal.asked, refusal.there) == (asked.total, capacity - used_bytes(held))


def test_a_refusal_names_bytes_asked_and_bytes_there_and_what_to_set() -> None:
    held = [Footprint(weights=600 << 20, reserve=0, kv=0)]
    refusal = refuse(Footprint(weights=400 << 20, reserve=64 << 20, kv=128 << 20), held, 1 << 30)
    assert refusal is not None
    assert "needs 592Mi (weights 400Mi, KV 128Mi, runtime reserve 64Mi" in refusal.message
    assert "there are 424Mi of 1Gi" in refusal.message
    assert str(592 << 20) in refusal.message
    assert "memory.kvMin" in refusal.message


@given(st.integers(0, 1 << 34), st.integers(1, 1 << 20), st.integers(1, 64))
def test_a_kv_budget_is_whole_pages_and_never_exceeded(budget: int, per_token: int, page: int) -> None:
    tokens = kv_tokens(budget, per_token, page)
    assert tokens % page == 0
    assert tokens * per_token <= budget < (tokens + page) * per_token


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 40))
def test_memory_is_dearer_the_more_is_used_and_never_infinite(used: int, capacity: int) -> None:
    price = memory_price(2.0, min(used, capacity), capacity)
    assert 0 <= price <= 2.0 / MIN_SLACK_SHARE + 1e-6
    assert memory_price(2.0, 0, capacity) == 0.0
    assert price <= memory_price(2.0, capacity, capacity) + 1e-6


GI = 1 << 30


def declared(name: str, *, pool: str = "cpu", kind: DeviceKind = DeviceKind.CPU, each: int = 4 * GI, host_pool: int = 0) -> InstanceSpec:
    """Of two devices."""
    spec = replace(instance_spec(), name=NamespacedName("default", name), pool=PoolName(pool), device_kind=kind)
    return replace(spec, devices=(0, 1), device_bytes=each, host_pool_bytes=host_pool)


def test_what_pools_declare_on_a_node_must_fit_into_the_container_of_its_engines() -> None:
    two = [declared("a"), declared("b")]
    assert refuse_node(two, ContainerMemory(limit=16 * GI, shared=0)) is None
    why = refuse_node(two, ContainerMemory(limit=16 * GI, shared=GI))
    assert why is not None
    assert "declare 16Gi of CPU devices and 0 of hostPool on this node, and its engines have 16Gi with 1Gi of /dev/shm in it" in why
    assert "lower the Pool's devices.count, devices.memory or hostPool, or raise the node pool's resources.limits.memory" in why


def test_memory_of_gpus_is_not_the_hosts_and_a_host_pool_is_one_for_all_instances_of_its_pool() -> None:
    gpus = [declared(name, pool="gpu", kind=DeviceKind.CUDA, host_pool=8 * GI) for name in "ab"]
    assert refuse_node(gpus, ContainerMemory(limit=8 * GI, shared=0)) is None
    assert refuse_node([*gpus, declared("c", pool="other", kind=DeviceKind.CUDA, host_pool=1)], ContainerMemory(limit=8 * GI, shared=0))
    nothing = [declared("a", kind=DeviceKind.CUDA)]
    assert refuse_node(nothing, ContainerMemory(limit=GI, shared=GI)) is None


@pytest.mark.parametrize("path", [CGROUP_V2, CGROUP_V1])
def test_a_containers_memory_is_its_control_groups_of_either_version(tmp_path: Path, path: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("1048576\n")
    assert memory_of_container(tmp_path) == ContainerMemory(limit=1 << 20, shared=0)
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert memory_of_container(tmp_path) == ContainerMemory(limit=1 << 20, shared=1 << 20), "no more than there is"


@pytest.mark.parametrize("said", ["max", "9223372036854771712", None])
def test_without_a_limit_it_is_the_machines_and_shared_memory_bounds_nothing(tmp_path: Path, said: str | None) -> None:
    (tmp_path / CGROUP_V2).parent.mkdir(parents=True)
    (tmp_path / "dev/shm").mkdir(parents=True)
    if said is not None:
        (tmp_path / CGROUP_V2).write_text(f"{said}\n")
    found = memory_of_container(tmp_path)
    assert found.limit > 1 << 28
    assert found.shared == 0
