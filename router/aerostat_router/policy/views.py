"""What routing policies see: engines, sessions and calls as values, and the load that this router added since the last snapshot.

Views are made once per telemetry message and read many times, so what a decision needs is precomputed here: a decision over forty
candidates costs tens of microseconds, not milliseconds. `Candidate` and `Load` belong to the fleet, which alone changes them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from aerostat_core.ids import Bytes, Epoch, LeaseId, NamespacedName, Seconds, SessionKey
from aerostat_core.latency import LatencyProfile
from aerostat_core.specs import EngineState

_BUCKETS = 40  # powers of two: up to 2^39 tokens


class Tier(IntEnum):
    """Where a session's prefix is; the value is the order of preference."""

    DEVICE = 0
    HOST = 1
    MISSING = 2


class PerTokenTable:
    """Seconds per unit by power of two: a lookup is one index, where interpolation costs microseconds per candidate."""

    __slots__ = ("per_unit",)

    def __init__(self, seconds_of: Callable[[int], Seconds]) -> None:
        self.per_unit = tuple(seconds_of(1 << k) / (1 << k) for k in range(_BUCKETS))  # by the bit length of n

    def seconds(self, n: int) -> Seconds:
        return n * self.per_unit[n.bit_length()] if n > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """A latency profile, ready for lookups: prefill seconds by new tokens, seconds of a decode step by batch."""

    prefill: PerTokenTable
    decode: PerTokenTable

    @classmethod
    def of(cls, profile: LatencyProfile) -> "Timing":
        return cls(PerTokenTable(profile.prefill_seconds), PerTokenTable(profile.decode_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One model on one instance, as its agent last said. Zero capacity or limit means that nobody knows it yet."""

    instance: NamespacedName
    model: NamespacedName
    state: EngineState
    epoch: Epoch
    timing: Timing
    host: str = ""
    port: int = 0
    call_key: str = field(default="", repr=False)
    is_draining: bool = False  # the instance takes no new session
    is_waking: bool = False
    running: int = 0
    waiting: int = 0
    max_running: int = 0  # admission units
    queue_seconds: Seconds = 0.0
    open_seconds: Seconds = 0.0
    open_in_seconds: Seconds = 0.0  # while waking: what is left
    kv_capacity_tokens: int = 0
    kv_free_tokens: int = 0
    kv_bytes_per_token: Bytes = 0
    weights_bytes: Bytes = 0
    memory_price: float = 0.0  # mu, seconds per byte
    max_context_tokens: int = 0
    reason: str = ""
    message: str = ""
    # Derived: asked for once per candidate and decision.
    can_serve: bool = field(init=False)
    takes_calls: bool = field(init=False)
    place: str = field(init=False)  # the instance's name alone, whose hash Python keeps
    activation_seconds: Seconds = field(init=False)  # until it is open

    def __post_init__(self) -> None:
        can_serve = self.state is EngineState.OPEN and self.port > 0
        object.__setattr__(self, "can_serve", can_serve)
        object.__setattr__(self, "takes_calls", can_serve and not self.is_draining)
        object.__setattr__(self, "place", self.instance.name)
        opening = self.open_in_seconds if self.is_waking and self.open_in_seconds > 0 else self.open_seconds
        object.__setattr__(self, "activation_seconds", 0.0 if self.state is EngineState.OPEN else opening)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    name: NamespacedName
    pool: str
    node: str
    sharing: str
    is_draining: bool
    engines: tuple[EngineView, ...]


class LeaseView(NamedTuple):
    """Admission capacity that is held for the return of a session. `expires_at` is in this router's own time.

    It and a session's view are named tuples: telemetry makes two of each per call, and a frozen dataclass takes five times as long.
    """

    id: LeaseId
    session: SessionKey
    model: NamespacedName
    instance: NamespacedName
    epoch: Epoch  # of the engine that served the last turn
    expires_at: Seconds
    units: int = 1
    is_published: bool = False  # telemetry has shown it; before that only the router that saw the completion knows of it


class SessionView(NamedTuple):
    """What one instance holds of a session. Good for the engine run `epoch` only.

    `is_reported` is false while the engine's word on the last turn is still to come: missing is then what nobody knows.
    """

    session: SessionKey
    model: NamespacedName
    instance: NamespacedName
    epoch: Epoch
    tier: Tier
    n_tokens: int
    lease: LeaseView | None = None
    is_reported: bool = True
    is_suspended: bool = False
    turns: int = 0
    finished_at: Seconds = 0.0  # since 1970


class CallView(NamedTuple):
    """A call as far as placing it needs; token counts are estimates. A named tuple, since one is made per decision."""

    model: NamespacedName
    session: SessionKey | None
    n_prompt_tokens: int
    n_output_tokens: int


class Source:
    """The agent that a candidate is known from; `heard_at` is when it last spoke."""

    __slots__ = ("address", "heard_at")

    def __init__(self, address: str, heard_at: Seconds) -> None:
        self.address = address
        self.heard_at = heard_at


class Load:
    """What is on an engine beyond its last snapshot: calls sent since (or, negative, ended since), their prefill work, leases."""

    __slots__ = ("n_calls", "n_leased", "seconds", "tokens")

    def __init__(self) -> None:
        self.n_calls = 0
        self.seconds: Seconds = 0.0
        self.tokens = 0
        self.n_leased = 0


class Candidate:
    """`recount` after each change of the engine's view or of the load: it is changed twice a call, and read for every one."""

    __slots__ = ("engine", "load", "place", "prefill_per_token", "ready_seconds", "source", "step_seconds", "takes_calls")

    def __init__(self, engine: EngineView, load: Load, source: Source) -> None:
        self.engine = engine
        self.load = load
        self.source = source
        self.recount()

    def recount(self) -> None:
        engine, load = self.engine, self.load
        self.place, self.takes_calls, self.prefill_per_token = engine.place, engine.takes_calls, engine.timing.prefill.per_unit
        self.ready_seconds = engine.queue_seconds + load.seconds + engine.activation_seconds  # until a call's own work may begin
        batch = engine.running + load.n_calls + 1
        self.step_seconds = engine.timing.decode.seconds(batch if batch > 0 else 1)  # of decode, with the call
