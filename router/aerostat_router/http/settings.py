"""Limits and time-outs of the data path, frozen and checked once at start; no value of these is read from the environment here."""

from dataclasses import dataclass, fields

from aerostat_core.addresses import Address

KIB = 1 << 10
MIB = 1 << 20
LOOPBACK = Address("127.0.0.1", 0, "the router's port")


class _Positive:
    """A bad setting is fatal at start and says what to set."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{type(self).__name__}.{field.name} must be above 0, got {value}: set it to a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings(_Positive):
    """What a client may send, and for how long we wait for it."""

    max_connections: int = 10_000
    max_head_bytes: int = 64 * KIB
    max_headers: int = 128
    max_body_bytes: int = 32 * MIB
    max_pipelined: int = 32  # whole requests that wait behind the one in progress
    max_held_bytes: int = 64 * KIB  # unparsed bytes that wait behind it, before reading is paused
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    stall_timeout_s: float = 60.0  # a client that takes nothing while we have something for it
    linger_timeout_s: float = 2.0  # after an early error: time to read it before the connection is reset
    tick_s: float = 0.25  # how late a time-out may come


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings(_Positive):
    """How engines are called. `keep_idle_s` stays below the 5 s after which uvicorn, SGLang's server, closes an idle connection."""

    connect_timeout_s: float = 3.0
    head_timeout_s: float = 600.0  # a call that is not streamed answers when its last token is there
    stream_idle_timeout_s: float = 120.0
    keep_idle_s: float = 4.0
    max_idle_connections: int = 512  # per endpoint
    max_head_bytes: int = 64 * KIB
    tick_s: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Where to listen, and how."""

    address: Address = LOOPBACK
    reuse_port: bool = False
    backlog: int = 2048
