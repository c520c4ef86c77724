"""Calls to engines over kept connections: the production adapter of `stream_call`.

While an endpoint has an idle connection, a call costs no task, future or timer. A kept connection may have been closed by the engine at the
moment of use; such a call is sent once more on a fresh one, provided that no byte has come back.
"""

import asyncio
import re
import ssl
from typing import cast

from aerostat_core import peers
from aerostat_core.ids import Seconds
from aerostat_router.http.deadlines import NEVER, Deadlines
from aerostat_router.http.messages import encode_fields
from aerostat_router.http.response_reader import MalformedResponseError, ResponseReader
from aerostat_router.http.settings import UpstreamSettings
from aerostat_router.http.stream_call import CallRequest, CallSink, Endpoint, Failure, FailureKind
from aerostat_runtime.tls import TlsFolder

_UNSAFE_IN_PATH = re.compile(rb"[\x00-\x20\x7f]")


class Shelf:
    """The connections of one endpoint. `idle` is a stack: the connection used last is the least likely to have been closed."""

    __slots__ = ("endpoint", "host_line", "idle", "n_connections")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        self.host_line = f" HTTP/1.1\r\nhost: {host}:{endpoint.port}\r\n".encode()
        self.idle: list[UpstreamConnection] = []
        self.n_connections = 0


class PooledCall:
    """`stream_call.Call`. Owns, one after the other, the connecting task and the connection."""

    __slots__ = ("connection", "has_given_head", "head_timeout_s", "is_head_request", "is_paused", "is_retry", "parts", "sink", "task")

    def __init__(self, parts: tuple[bytes, ...], sink: CallSink, head_timeout_s: Seconds, *, is_head_request: bool) -> None:
        self.parts = parts  # kept until the first byte of the answer, in case the call must be sent again
        self.sink = sink
        self.head_timeout_s = head_timeout_s
        self.is_head_request = is_head_request
        self.is_retry = False
        self.is_paused = False
        self.has_given_head = False
        self.task: asyncio.Task[None] | None = None
        self.connection: UpstreamConnection | None = None

    def cancel(self) -> None:
        if self.connection is not None:
            self.connection.drop()
        elif self.task is not None:
            self.task.cancel()
            self.task = None

    def pause(self) -> None:
        self.is_paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self.is_paused = False
        if self.connection is not None:
            self.connection.resume()


class UpstreamConnection(asyncio.Protocol):
    """One connection to an endpoint, with at most one call on it."""

    def __init__(self, pool: "Pool", endpoint: Endpoint) -> None:
        self.deadline = NEVER
        self.call: PooledCall | None = None
        self._pool = pool
        self.endpoint = endpoint
        self._reader = ResponseReader(pool.settings.max_head_bytes)
        self._is_fresh = True
        self._may_owe = False
        self._idle_timeout_s = pool.settings.stream_idle_timeout_s
        self._now = pool.loop.time
        self.shelf: Shelf | None = None  # while the pool counts this connection
        self.is_lost = False
        self._transport: asyncio.Transport

    def start(self, call: PooledCall) -> None:
        self.call = call
        call.connection = self
        self._reader.expect(is_head_request=call.is_head_request)
        self.deadline = self._now() + call.head_timeout_s
        for part in call.parts:
            self._transport.write(part)
        if call.is_paused:
            self.pause()

    def can_start(self) -> bool:
        return not self._transport.is_closing()

    def pause(self) -> None:
        """A client that takes nothing is the front's to time out, so our own clock stops, once the answer has begun."""
        self._transport.pause_reading()
        self.deadline = NEVER

    def resume(self) -> None:
        call = self.call
        if call is not None:
            self._transport.resume_reading()
            self.deadline = self._now() + (self._idle_timeout_s if call.has_given_head else call.head_timeout_s)

    def drop(self) -> None:
        """Closes at once, telling nobody."""
        if self.call is not None:
            self.call.connection = None
            self.call = None
        self._transport.abort()

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        call = self.call
        if call is None:  # nobody asked for these bytes: this connection cannot be trusted
            self._transport.abort()
            return
        reader = self._reader
        try:
            body = reader.feed(data)
        except MalformedResponseError as malformed:
            self._fail(FailureKind.PROTOCOL, f"not a valid response: {malformed}")
            return
        if not call.has_given_head:
            if reader.head is None:
                return
            call.has_given_head = True
            # By TLS the transport does not tell what it still has to send. Only refusals come before a long body was taken.
            self._may_owe = self._pool.has_tls and len(call.parts) > 1 and reader.head.status >= 400
            call.parts = ()
            call.sink.on_head(reader.head)
            if self.call is not call:
                return
        if body:
            call.sink.on_data(body)
            if self.call is not call:
                return
        if reader.is_done:
            self._finish(call)
        elif not call.is_paused:
            self.deadline = self._now() + self._idle_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._pool.discard(self)
        call = self.call
        if call is None:
            return
        reader = self._reader
        if reader.ends_with_connection and exc is None:
            self._detach(call)
            call.sink.on_done()
        elif not self._is_fresh and not reader.has_begun and not call.is_retry:
            self._detach(call)
            call.is_retry = True
            self._pool.connect(call, self.endpoint)
        elif self._pool.has_tls and self._is_fresh and not reader.has_begun:
            # In TLS 1.3 a server judges the client's certificate when the client is done, and sends already. uvicorn's says nothing then.
            self._fail(FailureKind.DISCONNECTED, f"{self.endpoint} closed a new connection; perhaps it refuses this router's certificate")
        else:
            self._fail(FailureKind.DISCONNECTED, f"{self.endpoint} closed the connection" + (f": {exc}" if exc else ""))

    def on_deadline(self) -> None:
        call = self.call
        if call is None:
            self._transport.abort()
        elif call.has_given_head:
            self._fail(FailureKind.IDLE_TIMEOUT, f"no byte for {self._idle_timeout_s:g} s")
        else:
            self._fail(FailureKind.HEAD_TIMEOUT, f"no answer within {call.head_timeout_s:g} s")

    # Inside.

    def _detach(self, call: PooledCall) -> None:
        self.call = call.connection = None

    def _finish(self, call: PooledCall) -> None:
        self._detach(call)
        # An answer that came before all of the request was taken leaves a rest that the next call would run into.
        if self._reader.can_reuse and not self._may_owe and self._transport.get_write_buffer_size() == 0:
            self._is_fresh = False
            if call.is_paused:
                self._transport.resume_reading()
            self._pool.keep(self)
        else:
            self._transport.close()
        call.sink.on_done()

    def _fail(self, kind: FailureKind, detail: str) -> None:
        call = self.call
        self.drop()
        if call is not None:
            call.sink.on_failure(Failure(kind, detail))


class Pool:
    """`stream_call.StreamCaller`. Used inside the running loop in which it was made; `close()` ends its connections.

    With a TLS folder every endpoint must prove to be an engine.
    """

    def __init__(self, settings: UpstreamSettings | None = None, tls: TlsFolder | None = None) -> None:
        self.settings = settings or UpstreamSettings()
        self._tls = tls
        self.loop = asyncio.get_running_loop()
        self._shelves: dict[Endpoint, Shelf] = {}
        self._connections: set[UpstreamConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._deadlines = Deadlines(self.loop, self.settings.tick_s)
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def has_tls(self) -> bool:
        return self._tls is not None

    @property
    def n_active(self) -> int:
        """Calls in progress, those still connecting included."""
        return len(self._connecting) + len(self.active_calls())

    def active_calls(self) -> list[PooledCall]:
        """Calls that have a connection."""
        return [connection.call for connection in self._connections if connection.call is not None]

    @property
    def n_idle(self) -> int:
        return sum(len(shelf.idle) for shelf in self._shelves.values())

    def stream_call(self, endpoint: Endpoint, request: CallRequest, sink: CallSink, *, head_timeout_s: Seconds | None = None) -> PooledCall:
        shelf = self._shelves.get(endpoint)
        parts = _encode(request, shelf or Shelf(endpoint))
        call = PooledCall(parts, sink, head_timeout_s or self.settings.head_timeout_s, is_head_request=request.method == b"HEAD")
        while shelf is not None and shelf.idle:
            connection = shelf.idle.pop()
            if connection.can_start():
                connection.start(call)
                return call
        self.connect(call, endpoint)
        return call

    def forget(self, endpoint: Endpoint) -> None:
        """The engine behind `endpoint` is gone or new: its idle connections are worth nothing."""
        shelf = self._shelves.get(endpoint)
        while shelf is not None and shelf.idle:
            shelf.idle.pop().drop()

    async def close(self) -> None:
        """Drops idle connections and calls in progress; the sinks of those hear nothing more."""
        tasks = list(self._connecting)
        for task in tasks:
            task.cancel()
        for connection in list(self._connections):
            connection.drop()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._emptied.wait()  # the loop reports each dropped connection in its next turn

    def check_integrity(self) -> None:
        """Idle connections carry no call and are counted once; every connection is on a shelf and under a deadline's eye."""
        idle = [connection for shelf in self._shelves.values() for connection in shelf.idle]
        if len(set(idle)) != len(idle) or any(connection.call is not None for connection in idle):
            raise AssertionError("an idle connection carries a call, or is listed twice")
        if not set(idle) <= self._connections:
            raise AssertionError("an idle connection is closed")
        n_shelved = sum(shelf.n_connections for shelf in self._shelves.values())
        if not n_shelved == len(self._connections) == len(self._deadlines):
            raise AssertionError(f"{n_shelved} shelved, {len(self._connections)} open, {len(self._deadlines)} watched")

    # The connections' side.

    def connect(self, call: PooledCall, endpoint: Endpoint) -> None:
        task = call.task = self.loop.create_task(self._connect(call, endpoint))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)  # for a task that is cancelled; else it leaves by itself, below

    def adopt(self, connection: UpstreamConnection) -> None:
        """Not when the connection is made: uvloop tells nothing about the end of one whose making is cancelled."""
        endpoint = connection.endpoint
        shelf = connection.shelf = self._shelves.setdefault(endpoint, Shelf(endpoint))
        shelf.n_connections += 1
        self._connections.add(connection)
        self._emptied.clear()
        self._deadlines.add(connection)

    def discard(self, connection: UpstreamConnection) -> None:
        shelf, connection.shelf = connection.shelf, None
        if shelf is None:
            return
        self._connections.discard(connection)
        self._deadlines.discard(connection)
        if connection in shelf.idle:
            shelf.idle.remove(connection)
        shelf.n_connections -= 1
        if shelf.n_connections == 0:
            del self._shelves[shelf.endpoint]
        if not self._connections:
            self._emptied.set()

    def keep(self, connection: UpstreamConnection) -> None:
        shelf = connection.shelf
        if shelf is None or len(shelf.idle) >= self.settings.max_idle_connections:
            connection.drop()
            return
        connection.deadline = self.loop.time() + self.settings.keep_idle_s
        shelf.idle.append(connection)

    async def _connect(self, call: PooledCall, endpoint: Endpoint) -> None:
        settings = self.settings
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                connection = await self._open(endpoint)
        except TimeoutError:
            failure = Failure(FailureKind.CONNECT_TIMEOUT, f"{endpoint} did not accept within {settings.connect_timeout_s:g} s")
        except ssl.SSLError as broken:
            failure = Failure(FailureKind.CONNECT, f"no TLS with {endpoint} as {peers.ENGINES}: {broken}")
        except OSError as refused:
            failure = Failure(FailureKind.CONNECT, f"{endpoint} refused: {refused}")
        else:
            self._leave_connecting(call)
            if not connection.is_lost:
                self.adopt(connection)
                connection.start(call)
                return
            failure = Failure(FailureKind.DISCONNECTED, f"{endpoint} accepted and closed")
        self._leave_connecting(call)
        call.sink.on_failure(failure)

    async def _open(self, endpoint: Endpoint) -> UpstreamConnection:
        """Raises OSError, of which ssl.SSLError is one."""
        make, limit_s = lambda: UpstreamConnection(self, endpoint), self.settings.connect_timeout_s
        if self._tls is None:
            _, connection = await self.loop.create_connection(make, endpoint.host, endpoint.port)
        else:
            _, connection = await self.loop.create_connection(
                make,
                endpoint.host,
                endpoint.port,
                ssl=self._tls.client_context(),
                server_hostname=peers.ENGINES,
                ssl_shutdown_timeout=limit_s,
            )
        return connection

    def _leave_connecting(self, call: PooledCall) -> None:
        if call.task is not None:
            self._connecting.discard(call.task)
            call.task = None


def _encode(request: CallRequest, shelf: Shelf) -> tuple[bytes, ...]:
    """The request as one piece, or as head and body where joining would copy much."""
    method, path, headers, body = request
    if _UNSAFE_IN_PATH.search(path) or not path.startswith(b"/"):
        raise ValueError(f"not a path: {path!r}")
    length = b"content-length: %d\r\n\r\n" % len(body) if body or method in (b"POST", b"PUT", b"PATCH") else b"\r\n"
    if len(body) > 64 << 10:
        return b"".join((method, b" ", path, shelf.host_line, encode_fields(headers), length)), body
    return (b"".join((method, b" ", path, shelf.host_line, encode_fields(headers), length, body)),)
