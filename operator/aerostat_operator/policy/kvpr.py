"""What a replica claims of an instance, what an instance has, and the pressure that results (seed 003, KVPR).

    KVPR(g) = sum of d_m / (bytes that weights leave to KV on g)

All figures are per device: an instance's devices carry equal shares. Where a claim goes is `placement`'s question.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum, inf

from aerostat_core.ids import Bytes, InstanceName, ModelName, NodeName, Seconds
from aerostat_core.quantities import format_size
from aerostat_core.specs import DemandDefinition, PoolMode, Sharing


def request_rate_demand(*, calls_per_second: float, ttft: Seconds, tensor_parallel: int) -> float:
    """Demand on one device, seed 003's short form: d = r / s."""
    return calls_per_second / ttft / tensor_parallel


def token_rate_demand(*, tokens_per_second: float, kv_bytes_per_token: Bytes, tpot: Seconds) -> float:
    """Demand on one device, the OSDI paper's form. `kv_bytes_per_token` is what one device holds of a token.

    It comes measured rather than divided by tensor parallelism: MLA keeps all of it on every device, and no model
    spreads it over more devices than it has KV heads.
    """
    return tokens_per_second * kv_bytes_per_token / tpot


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one replica of a model asks of each device of an instance.

    `decode_share` is t_D / T of `Rounds` (None: no profile yet), `master_bytes` the whole model's copy in host memory.
    """

    model: ModelName
    demand: float = 0.0
    weights_bytes: Bytes = 0
    kv_floor_bytes: Bytes = 0
    reserve_bytes: Bytes = 0
    decode_share: float | None = None
    master_bytes: Bytes = 0

    @property
    def fixed_bytes(self) -> Bytes:
        return self.weights_bytes + self.kv_floor_bytes + self.reserve_bytes

    def __str__(self) -> str:
        parts = f"weights {format_size(self.weights_bytes)} + KV {format_size(self.kv_floor_bytes)}"
        return f"{parts} + reserve {format_size(self.reserve_bytes)} = {format_size(self.fixed_bytes)} per device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """An instance as placement sees it. Not accepting: its node is cordoned or lost, so its models go elsewhere."""

    instance: InstanceName
    node: NodeName
    capacity_bytes: Bytes
    accepting: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a pool shares its devices. `host_bytes` bounds the masters of a node where models take turns (0: unbounded)."""

    sharing: Sharing = Sharing.CONCURRENT
    mode: PoolMode = PoolMode.COLD
    demand: DemandDefinition = DemandDefinition.TOKEN_RATE
    staging_bytes: Bytes = 0
    host_bytes: Bytes = 0
    hysteresis: float = 0.10
    max_moves: int = 1

    def kv_room(self, capacity_bytes: Bytes, claims: Sequence[Claim]) -> Bytes:
        """The denominator: bytes of a device that are left to KV. May be negative.

        In `Rounds` one model's weights are mapped at a time. Reserves stay mapped in every mode (the agent's ledger
        charges them in every state), so they count in both.
        """
        reserves = sum(c.reserve_bytes for c in claims)
        if self.sharing is Sharing.ROUNDS:
            return capacity_bytes - max((c.weights_bytes for c in claims), default=0) - self.staging_bytes - reserves
        return capacity_bytes - sum(c.weights_bytes for c in claims) - reserves

    def free_bytes(self, capacity_bytes: Bytes, claims: Sequence[Claim]) -> Bytes:
        """What is left to KV beyond the floors."""
        return self.kv_room(capacity_bytes, claims) - sum(c.kv_floor_bytes for c in claims)

    def pressure(self, capacity_bytes: Bytes, claims: Sequence[Claim]) -> float:
        """KVPR. Infinite where there is demand and no room at all."""
        demand = fsum(c.demand for c in claims)  # fsum: the order of claims must not decide a comparison
        if demand == 0:
            return 0.0
        room = self.kv_room(capacity_bytes, claims)
        return demand / room if room > 0 else inf


@dataclass(slots=True)
class Board:
    """Who sits where while a decision is made. Mutable: `put` and `take` change it, everything else reads."""

    rules: Rules
    seats: tuple[Seat, ...]
    _at: dict[InstanceName, list[Claim]] = field(init=False)
    _seat: dict[InstanceName, Seat] = field(init=False)

    def __post_init__(self) -> None:
        self.seats = tuple(sorted(self.seats, key=lambda seat: seat.instance))
        self._at = {seat.instance: [] for seat in self.seats}
        self._seat = {seat.instance: seat for seat in self.seats}

    def __contains__(self, instance: InstanceName) -> bool:
        return instance in self._seat

    def seat(self, instance: InstanceName) -> Seat:
        return self._seat[instance]

    def at(self, instance: InstanceName) -> tuple[Claim, ...]:
        return tuple(self._at[instance])

    def seats_of(self, model: ModelName) -> tuple[InstanceName, ...]:
        return tuple(i for i, claims in self._at.items() if any(c.model == model for c in claims))

    def put(self, claim: Claim, instance: InstanceName) -> None:
        self._at[instance].append(claim)

    def take(self, claim: Claim, instance: InstanceName) -> None:
        self._at[instance] = [c for c in self._at[instance] if c.model != claim.model]

    def pressure(self, instance: InstanceName, extra: Claim | None = None) -> float:
        claims = self._at[instance] if extra is None else [*self._at[instance], extra]
        return self.rules.pressure(self._seat[instance].capacity_bytes, claims)

    def max_pressure(self) -> float:
        return max((self.pressure(i) for i in self._at), default=0.0)

    def free_bytes(self, instance: InstanceName, extra: Claim | None = None) -> Bytes:
        claims = self._at[instance] if extra is None else [*self._at[instance], extra]
        return self.rules.free_bytes(self._seat[instance].capacity_bytes, claims)

    def fits(self, claim: Claim, instance: InstanceName) -> bool:
        return self.obstacle(claim, instance) is None

    def obstacle(self, claim: Claim, instance: InstanceName) -> str | None:
        """Why this claim cannot join that instance now; None where it can."""
        seat, present = self._seat[instance], self._at[instance]
        if not seat.accepting:
            return f"{instance} accepts no models: its node is cordoned or not ready"
        if any(c.model == claim.model for c in present):
            return f"{instance} has a replica of it already"
        if self.rules.mode is PoolMode.HOT and present:
            return f"{instance} is pinned to {present[0].model}"
        if self.free_bytes(instance, claim) < 0:
            there, capacity = max(self.free_bytes(instance), 0), seat.capacity_bytes
            return f"{claim}, {format_size(there)} of {format_size(capacity)} are free on {instance}"
        if self.rules.sharing is Sharing.ROUNDS:
            return self._round_obstacle(claim, seat, present)
        return None

    def _round_obstacle(self, claim: Claim, seat: Seat, present: Iterable[Claim]) -> str | None:
        shares = fsum(c.decode_share or 0.0 for c in (*present, claim))
        if shares >= 1:  # then no finite round exists (design section 4)
            return f"decode of all models would take {shares:.2f} of the time on {seat.instance}; it must stay below 1"
        if not self.rules.host_bytes:
            return None
        masters = {c.model: c.master_bytes for s in self.seats if s.node == seat.node for c in self._at[s.instance]}
        there = self.rules.host_bytes - sum(masters.values())
        if claim.model not in masters and claim.master_bytes > there:
            asked = format_size(claim.master_bytes)
            return f"its master copy needs {asked} of host memory, {format_size(max(there, 0))} are free on {seat.node}"
        return None

    def check_integrity(self) -> None:
        """No device is promised twice, no instance has two replicas of a model, a hot instance has one model."""
        for instance, claims in self._at.items():
            models = [c.model for c in claims]
            assert len(models) == len(set(models)), f"{instance} has a model twice: {models}"
            assert not claims or self.free_bytes(instance) >= 0, f"{instance} is over its capacity"
            assert self.rules.mode is not PoolMode.HOT or len(claims) <= 1, f"hot {instance} has {models}"
