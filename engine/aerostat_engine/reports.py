"""What an engine tells its agent, as values. `wire` turns them into frames; nothing here knows SGLang or sockets."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from aerostat_core.ids import Bytes, Seconds
from aerostat_core.prefix_hash import token_prefix

Tokens = array  # of int64, as SGLang's prefix tree takes them


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Tokens that the prefix cache holds: `tokens` is cut at a full page. Hashed when first asked, on the link's thread."""

    tokens: Tokens[int] = field(repr=False)
    page_size: int

    @cached_property
    def hash(self) -> bytes:
        return token_prefix(self.tokens, self.page_size)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What does not change while the engine lives."""

    pid: int
    tensor_parallel: int
    plugin_version: str
    sglang_version: str
    attention_backend: str
    page_size: int
    kv_capacity_tokens: int
    kv_bytes_per_token: Bytes
    weights_bytes: Bytes
    max_context_tokens: int
    max_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A turn is over. `session` is empty for calls that carried no session key.

    Seconds count from its arrival at the scheduler: queue and computing, nothing of the router, HTTP, the tokenizer or the detokenizer.
    `first_token_seconds` is None when it ended before its first token.
    """

    session: str
    request_id: str
    prefix: Prefix
    n_prompt_tokens: int
    n_output_tokens: int
    n_cached_tokens: int
    reason: str
    first_token_seconds: Seconds | None
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The scheduler's state between two batches. `last_token_at` is on the machine's monotonic clock."""

    running: int
    waiting: int
    waiting_tokens: int
    kv_used_tokens: int
    kv_evictable_tokens: int
    last_token_at: Seconds


class Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One batch. Prefill: `n_new` tokens are computed; decode: `n_new` is the batch size. They attend to `n_context` tokens in all."""

    phase: Phase
    n_new: int
    n_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    step: Step
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Sessions whose prefix is no longer whole on the device, or no longer known to be."""

    sessions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unhealthy:
    """The scheduler makes no more progress."""

    why: str


Report = Finished | Boundary | ProfilePoint | Missing | Unhealthy
