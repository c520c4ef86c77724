"""What an engine tells its agent, as values. `wire` makes them of frames; nothing here knows a socket."""

from dataclasses import dataclass

from aerostat_agent.policy.tracks import EngineKey
from aerostat_core.ids import Bytes, Epoch, Seconds, SessionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One rank of one run of one engine."""

    key: EngineKey
    epoch: Epoch
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A prefix that an engine holds; opaque."""

    epoch: Epoch
    prefix_hash: bytes
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    pid: int
    tensor_parallel: int
    versions: str
    page_size_tokens: int
    kv_capacity_tokens: int
    kv_bytes_per_token: Bytes
    weights_bytes: Bytes
    max_context_tokens: int
    max_running: int
    sessions: tuple[tuple[SessionKey, Handle], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    session: SessionKey
    handle: Handle | None
    n_prompt_tokens: int
    n_output_tokens: int
    n_cached_tokens: int
    first_token_seconds: Seconds | None = None  # from its arrival in the engine; None: it ended before its first token
    seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_used_tokens: int = 0
    kv_evictable_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """`n` is new tokens of a prefill, or the batch of a decode step."""

    is_prefill: bool
    n: int
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsMissing:
    sessions: tuple[SessionKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unhealthy:
    why: str


EngineEvent = Finished | Boundary | ProfilePoint | SessionsMissing | Unhealthy
