"""What users declare and what the operator derives from it, as frozen values.

`resources` reads them from objects of the API and writes them back. Sizes are bytes, times seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from aerostat_core.ids import Bytes, InstanceName, ModelName, NamespacedName, NodeName, PoolName, Seconds


class PoolMode(StrEnum):
    HOT = "Hot"  # one pinned model per instance
    COLD = "Cold"  # several models share an instance


class Sharing(StrEnum):
    ROUNDS = "Rounds"  # one model at a time, a slot each (Talaria)
    CONCURRENT = "Concurrent"  # several at once (Prism)


class DeviceKind(StrEnum):
    CPU = "CPU"
    CUDA = "CUDA"


class DemandDefinition(StrEnum):
    REQUEST_RATE = "RequestRate"  # calls/s over the TTFT target, seed 003's short form
    TOKEN_RATE = "TokenRate"  # token rate x KV bytes per token over the TPOT target, the OSDI paper's


class ResidencyFloor(StrEnum):
    """The lowest rung that an idle model may sink to."""

    ACTIVE = "Active"
    PARKED = "Parked"
    HOST = "Host"
    DISK = "Disk"


class OverloadPolicy(StrEnum):
    QUEUE = "Queue"
    REJECT = "Reject"
    SPILL = "Spill"


class EngineState(StrEnum):
    ABSENT = "Absent"
    STARTING = "Starting"
    PARKED = "Parked"
    CLOSED = "Closed"
    OPEN = "Open"
    DRAINING = "Draining"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    policy: OverloadPolicy = OverloadPolicy.QUEUE
    spill_to: ModelName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`kv_min_bytes` is the KV that the model always has, `kv_max_bytes` what it may grow to; both per replica.

    `weights_bytes` is what the user says; when absent, what an agent measured is used.
    """

    name: NamespacedName
    uid: str
    generation: int
    labels: Mapping[str, str]
    created_at: str
    source_uri: str
    secret: str | None
    served_name: str
    pool: PoolName | None
    pool_labels: Mapping[str, str]
    min_replicas: int
    max_replicas: int
    tensor_parallel: int
    slo: str | None
    weights_bytes: Bytes | None
    kv_min_bytes: Bytes
    kv_max_bytes: Bytes | None
    context_tokens: int | None
    engine_args: Mapping[str, str]
    residency_floor: ResidencyFloor
    overload: Overload
    trust_remote_code: bool
    deleting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    name: NamespacedName
    generation: int
    ttft: Seconds
    tpot: Seconds
    hold_budget: Seconds  # how long a call may wait for its model to open
    objective: float  # share of calls that must meet both, 0..1


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """`count` and `memory_bytes` are settings on the CPU device; on CUDA the node says them (0 here)."""

    kind: DeviceKind
    count: int
    memory_bytes: Bytes
    reserve_bytes: Bytes  # runtime reserve of one engine, until the agent has measured it


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    demand: DemandDefinition
    hysteresis: float
    max_moves_per_cycle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings:
    lease_ttl: Seconds
    memory_price: float  # mu_0, seconds per byte
    replica_penalty: Seconds  # nu


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    name: NamespacedName
    uid: str
    generation: int
    labels: Mapping[str, str]
    created_at: str
    mode: PoolMode
    sharing: Sharing
    node_selector: Mapping[str, str]
    devices: Devices
    devices_per_instance: int
    allow_remote_code: bool
    host_pool_bytes: Bytes
    idle_time: Seconds
    placement: PlacementSettings
    routing: RoutingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """`device_count` and `device_bytes` are 0 where the node has none that we know (then the Pool's settings count)."""

    name: NodeName
    labels: Mapping[str, str]
    schedulable: bool
    ready: bool
    device_count: int
    device_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTargets:
    ttft: Seconds
    tpot: Seconds
    hold_budget: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceModel:
    """One model that may live on an instance. `resident` says that it must be open now, `floor` how low it may sink."""

    name: ModelName
    generation: int
    source_uri: str
    secret: str | None
    served_name: str
    engine_args: Mapping[str, str]
    context_tokens: int | None
    trust_remote_code: bool
    resident: bool
    residency_floor: ResidencyFloor
    weights_bytes: Bytes | None
    kv_floor_bytes: Bytes
    kv_ceiling_bytes: Bytes
    slo: SloTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """Desired state of one tensor-parallel group of devices on one node."""

    name: NamespacedName
    pool: PoolName
    node: NodeName
    device_kind: DeviceKind
    devices: tuple[int, ...]
    device_bytes: Bytes  # capacity of one device
    reserve_bytes: Bytes  # of one engine, per device
    sharing: Sharing
    models: tuple[InstanceModel, ...]
    host_pool_bytes: Bytes
    idle_time: Seconds
    lease_ttl: Seconds
    memory_price: float
    draining: bool = False

    @property
    def tensor_parallel(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceModelStatus:
    """What an agent reports about one model of an instance. Figures that nobody measured yet are None."""

    name: ModelName
    generation: int
    state: EngineState
    reason: str
    message: str
    progress: str = ""
    weights_bytes: Bytes | None = None
    reserve_bytes: Bytes | None = None  # measured, per device; None: the spec's counts
    kv_bytes_per_token: Bytes | None = None
    tokens_per_second: float | None = None  # over 60 s
    requests_per_second: float | None = None  # over 60 s
    ttft_p95: Seconds | None = None
    attainment: float | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    name: NamespacedName
    agent_epoch: int
    heartbeat: str  # RFC 3339
    agent_address: str  # host:port of the agent's telemetry service
    models: tuple[InstanceModelStatus, ...] = ()
    device_bytes: Bytes = 0
    conditions: tuple["Condition", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`status` is "True", "False" or "Unknown". A condition that does not apply is absent, never Unknown for that."""

    type: str
    status: str
    reason: str
    message: str
    observed_generation: int = 0
    last_transition_time: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One replica of a model, for `Model.status.placements`."""

    instance: InstanceName
    node: NodeName
    state: EngineState
