"""The port through which the router calls engines: start a call, get its answer in callbacks as it arrives.

Callbacks rather than an iterator, since an iterator costs a task and a wake-up per chunk; `answer.py` is the convenient form on top.
`upstream.Pool` is the adapter; tests hold any other to the same suite.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from aerostat_router.http.messages import Header, ResponseHead


class Endpoint(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class CallRequest(NamedTuple):
    """What the upstream gets: exactly these headers, plus `Host` and `Content-Length`. Nothing of the client's goes on by itself."""

    method: bytes
    path: bytes
    headers: Sequence[Header] = ()
    body: bytes = b""


class FailureKind(Enum):
    CONNECT = "connect"
    CONNECT_TIMEOUT = "connect_timeout"
    HEAD_TIMEOUT = "head_timeout"
    IDLE_TIMEOUT = "idle_timeout"
    DISCONNECTED = "disconnected"
    PROTOCOL = "protocol"


class Failure(NamedTuple):
    kind: FailureKind
    detail: str


class CallSink(Protocol):
    """Receives one answer: `on_head`, any number of `on_data`, then `on_done`; or `on_failure` at any point. Nothing follows
    `on_done`, `on_failure` or `cancel()`, and nothing comes before `stream_call` has returned."""

    def on_head(self, head: ResponseHead) -> None: ...

    def on_data(self, data: bytes) -> None:
        """A piece of the body, without transfer coding, never empty."""
        ...

    def on_done(self) -> None: ...

    def on_failure(self, failure: Failure) -> None: ...


class Call(Protocol):
    """A call in progress. All verbs are harmless once it is over."""

    def cancel(self) -> None:
        """Drops the call and closes its connection at once, which is how an engine learns to stop computing."""
        ...

    def pause(self) -> None:
        """Asks for no more data for now; the upstream feels it through TCP. What is already here may still come."""
        ...

    def resume(self) -> None: ...


class StreamCaller(Protocol):
    def stream_call(self, endpoint: Endpoint, request: CallRequest, sink: CallSink, *, head_timeout_s: float | None = None) -> Call:
        """Starts the call. `head_timeout_s` (default: the adapter's setting) bounds the time to the answer's head.

        Raises ValueError when a header or the path could not be written safely.
        """
        ...
