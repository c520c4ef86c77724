"""The connection of a client: reads requests, has them handled one at a time, in order, and decides when the connection ends.

An end of stream from the client while it is owed an answer counts as a hang-up (as in nginx and Go): a client that went away shows nothing
else, and an engine must not compute for nobody. For that reason reading goes on while an answer is under way; what arrives is held
unparsed, and reading stops only past a bound.
"""

import asyncio
import logging
from email.utils import formatdate
from time import time
from typing import cast

from aerostat_core.api_errors import ApiError
from aerostat_core.ids import Seconds
from aerostat_router.http import errors
from aerostat_router.http.deadlines import NEVER, Deadlines
from aerostat_router.http.exchange import Exchange, Handler
from aerostat_router.http.messages import CONTINUE, Request
from aerostat_router.http.request_reader import Phase, RequestReader
from aerostat_router.http.settings import FrontSettings
from aerostat_router.http.stream_call import StreamCaller

logger = logging.getLogger(__name__)


class Hub:
    """What all connections of one server share. Mutable: the set of connections, the in-flight count and the draining flag."""

    def __init__(self, handler: Handler, caller: StreamCaller, settings: FrontSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.handler = handler
        self.caller = caller
        self.settings = settings
        self.loop = loop
        self.deadlines = Deadlines(loop, settings.tick_s)
        self.fronts: set[Front] = set()
        self.n_in_flight = 0
        self.is_draining = False
        self.emptied = asyncio.Event()
        self.emptied.set()
        self._date = (-1.0, b"")

    def date(self) -> bytes:
        second, line = self._date
        now = self.loop.time()
        if now - second >= 1 or second < 0:
            line = b"date: %b\r\n" % formatdate(time(), usegmt=True).encode()
            self._date = (now, line)
        return line

    def check_integrity(self) -> None:
        """Every request in flight belongs to an open connection, and every connection is under a deadline's eye."""
        n_busy = sum(front.is_busy for front in self.fronts)
        if n_busy != self.n_in_flight:
            raise AssertionError(f"{self.n_in_flight} requests in flight on {n_busy} busy connections")
        if len(self.deadlines) != len(self.fronts):
            raise AssertionError(f"{len(self.deadlines)} watched of {len(self.fronts)} connections")


class Front(asyncio.Protocol):
    """One client connection (`exchange.Client`). States: reading, busy (an exchange is open), closing, lingering."""

    def __init__(self, hub: Hub) -> None:
        self.deadline = NEVER
        self.is_write_paused = False
        self.peer = ""
        self._hub = hub
        self._reader = RequestReader(hub.settings)
        self._exchange: Exchange | None = None
        self._is_pumping = False
        self._is_closing = False  # nothing more is read or answered; what is written still goes out
        self._is_lingering = False  # the same, and input is thrown away until the client has read our last words
        self._held: list[bytes] = []
        self._n_held = 0
        self._armed: Phase | None = None  # the phase whose deadline is set: progress inside a phase does not extend it
        self._transport: asyncio.Transport

    @property
    def is_busy(self) -> bool:
        return self._exchange is not None

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peername = transport.get_extra_info("peername")
        self.peer = str(peername[0]) if isinstance(peername, tuple) else ""
        hub = self._hub
        hub.fronts.add(self)
        hub.emptied.clear()
        hub.deadlines.add(self)
        if len(hub.fronts) > hub.settings.max_connections:
            self._refuse(errors.too_many_connections(hub.settings.max_connections))
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        hub = self._hub
        self._is_closing = True
        hub.deadlines.discard(self)
        self._leave()
        hub.fronts.discard(self)
        if not hub.fronts:
            hub.emptied.set()

    def eof_received(self) -> bool:
        if self._exchange is not None:
            self._leave()
            self._transport.abort()
        return False  # the transport flushes what is written, then closes

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        if self._exchange is None and not self.is_write_paused:
            self._reader.feed(data)
            self._pump()
            return
        self._held.append(data)
        self._n_held += len(data)
        if self._n_held > self._hub.settings.max_held_bytes:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._rearm()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._rearm()
        if self._exchange is not None:
            self._exchange.resume()
        elif not self._is_closing:
            self._pump()

    # The exchange's side.

    def now(self) -> Seconds:
        return self._hub.loop.time()

    def date(self) -> bytes:
        return self._hub.date()

    def is_keeping(self) -> bool:
        return not self._hub.is_draining

    def write(self, data: bytes) -> None:
        if not self._is_closing:
            self._transport.write(data)

    def end(self, exchange: Exchange, *, keep: bool) -> None:
        if exchange is not self._exchange:
            return
        self._exchange = None
        self._hub.n_in_flight -= 1
        if not keep or self._hub.is_draining:
            self._close()
        elif not self._is_pumping:
            self._pump()

    # Inside.

    def _leave(self) -> None:
        """The client is gone: whatever works for it stops now."""
        exchange, self._exchange = self._exchange, None
        self._is_closing = True
        if exchange is not None:
            self._hub.n_in_flight -= 1
            exchange.abandon()

    def _pump(self) -> None:
        """Handles what is ready, until an exchange stays open, the client takes no more answers, or more input is needed."""
        self._is_pumping = True
        reader = self._reader
        while self._exchange is None and not self._is_closing and not self.is_write_paused:
            if reader.ready:
                self._start(reader.ready.popleft())
            elif reader.error is not None:
                self._refuse(reader.error)
            elif reader.phase is Phase.OVER:
                self._close()
            elif self._held:
                data, self._held, self._n_held = b"".join(self._held), [], 0
                self._transport.resume_reading()
                reader.feed(data)
            else:
                break
        self._is_pumping = False
        if self._exchange is None and not self._is_closing:
            if reader.wants_continue:
                reader.wants_continue = False
                self._transport.write(CONTINUE)
            if self._hub.is_draining and reader.phase is Phase.IDLE:
                self._close()
        self._arm()

    def _start(self, request: Request) -> None:
        hub = self._hub
        exchange = Exchange(request, self, hub.caller)
        self._exchange = exchange
        self._armed = None  # the time until the next request begins anew behind this one
        hub.n_in_flight += 1
        try:
            hub.handler.handle(exchange)
        except Exception:
            logger.exception("the handler failed on %s %s", request.method.decode(), request.path.decode("latin-1"))
            exchange.give_up()

    def _refuse(self, error: ApiError) -> None:
        """Answers what is no request, and closes so that the client can still read why (a reset would discard the answer)."""
        body = errors.OPENAI.body(error)
        fields = b"".join([b"%b: %b\r\n" % field for field in errors.error_headers(error)])
        self._transport.write(
            b"HTTP/1.1 %d Error\r\n%b%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (error.status, self.date(), fields, len(body), body)
        )
        self._is_closing = self._is_lingering = True
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._rearm()

    def _close(self) -> None:
        self._is_closing = True
        self._transport.close()
        self._rearm()

    def drain(self) -> None:
        """Closes now if the connection waits for a request; a busy one closes behind its answer."""
        if self._exchange is None and not self._is_closing and self._reader.phase is Phase.IDLE:
            self._close()

    def cut(self) -> None:
        self._transport.abort()

    # Deadlines.

    def _rearm(self) -> None:
        self._armed = None
        self._arm()

    def _arm(self) -> None:
        settings = self._hub.settings
        if self._is_lingering:
            wait = settings.linger_timeout_s
        elif self._is_closing or self.is_write_paused:
            wait = settings.stall_timeout_s
        elif self._exchange is not None:
            self._armed = None
            self.deadline = NEVER
            return
        else:
            phase = self._reader.phase
            if phase is self._armed:
                return
            self._armed = phase
            wait = self._phase_timeout(phase)
        self.deadline = self._hub.loop.time() + wait

    def _phase_timeout(self, phase: Phase) -> Seconds:
        settings = self._hub.settings
        if phase is Phase.HEAD:
            return settings.head_timeout_s
        return settings.body_timeout_s if phase is Phase.BODY else settings.idle_timeout_s

    def on_deadline(self) -> None:
        phase = self._reader.phase
        if self._is_closing or self.is_write_paused:
            self._leave()
            self._transport.abort()
        elif phase is Phase.IDLE:
            self._close()
        else:
            what = "head" if phase is Phase.HEAD else "body"
            self._refuse(errors.slow_request(what, self._phase_timeout(phase)))
