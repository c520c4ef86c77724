"""One client call from arrival to its end, and the port through which dispatch moves it, whatever protocol it came by."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from aerostat_core.api_errors import ApiError
from aerostat_core.ids import Epoch, NamespacedName, Seconds, SessionKey
from aerostat_core.specs import Model
from aerostat_router.http.exchange import Outcome
from aerostat_router.http.stream_call import Endpoint, Failure
from aerostat_router.in_flight import Ticket
from aerostat_router.policy.placement import Route
from aerostat_router.policy.views import Tier


class Usage(NamedTuple):
    n_prompt: int
    n_cached: int
    n_output: int


class Target(NamedTuple):
    """Where a call goes now. `model` is another one than asked for when the call spills."""

    instance: NamespacedName
    epoch: Epoch
    endpoint: Endpoint
    call_key: str
    route: Route
    tier: Tier
    model: Model


class Result(NamedTuple):
    """How one try ended. `refusal` is the engine's own error body."""

    outcome: Outcome
    status: int | None = None
    failure: Failure | None = None
    refusal: bytes = b""
    usage: Usage | None = None


class Carrier(Protocol):
    """The client's side of a call. Each verb is called with no try under way, and `refuse` at most once, as the last."""

    def forward(self, target: Target) -> None:
        """Start a try; report its first byte and its end to the dispatcher."""
        ...

    def refuse(self, error: ApiError) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """Mutable: the dispatcher's record. Token counts are estimates, times the router's own."""

    carrier: Carrier
    model: Model
    session: SessionKey | None
    tenant: str
    n_body_bytes: int
    n_prompt_tokens: int
    n_output_tokens: int
    received_at: Seconds
    hold_until: Seconds
    ttft: Seconds  # what the caller may expect: the SLO's, or its own hint
    is_final: bool = False
    wants_lease: bool = True  # the session can be recognised when it returns

    target: Target | None = None
    ticket: Ticket | None = None
    first_byte_at: Seconds | None = None
    held_at: Seconds | None = None
    held_seconds: Seconds = 0.0
    was_held_over_wake: bool = False
    is_checking: bool = False  # an engine's health is being asked for on its behalf
    failed: dict[tuple[NamespacedName, Epoch], Seconds] = field(default_factory=dict)  # engine runs that failed it, and when
    n_tries: int = 0
    is_over: bool = False
