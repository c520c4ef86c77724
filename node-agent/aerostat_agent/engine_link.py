"""The Unix socket at which engines report to their agent: one connection per rank, from Hello until it is lost.

A frame of another run of the engine, or of one that this agent does not know, is dropped or refused here. An engine whose agent
was restarted connects and says Hello again.
"""

import asyncio
import logging
import os
import socket
from dataclasses import dataclass
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from aerostat.v1 import agent_pb2 as pb
from aerostat_agent import wire
from aerostat_agent.engine_events import EngineEvent, Hello, Identity
from aerostat_agent.policy.tracks import EngineKey
from aerostat_core.ids import Epoch, Seconds
from aerostat_runtime.framing import FramedSocket, FramingError

_log = logging.getLogger(__name__)

HELLO_LIMIT: Final[Seconds] = 10.0
SEND_LIMIT: Final[Seconds] = 5.0
MAX_LINKS: Final = 256


class EngineListener(Protocol):
    """Who hears what engines say. None of it waits."""

    def on_hello(self, who: Identity, hello: Hello) -> str:
        """Why it is refused; empty: welcome."""
        ...

    def on_event(self, who: Identity, event: EngineEvent) -> None: ...

    def on_link_lost(self, who: Identity) -> None: ...


@dataclass(frozen=True, slots=True)
class _Link:
    who: Identity
    peer: FramedSocket
    task: "asyncio.Task[None]"


class EngineLinks:
    """The server, and the way back to an engine."""

    def __init__(self, listener: EngineListener, agent_epoch: Epoch) -> None:
        self._listener = listener
        self._agent_epoch = agent_epoch
        self._links: dict[tuple[EngineKey, int], _Link] = {}  # by rank; the latest connection of each
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, sock: socket.socket) -> None:
        """Accept until cancelled; links end with it."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                connection, _ = await loop.sock_accept(sock)
                if len(self._tasks) >= MAX_LINKS:
                    _log.warning("refused a connection of an engine: %d are open", MAX_LINKS)
                    connection.close()
                    continue
                task = asyncio.create_task(self._converse(FramedSocket(connection)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ask_boundary(self, key: EngineKey) -> None:
        """The engine's first rank answers with a Boundary event. Without a link nothing is asked."""
        if (link := self._links.get((key, 0))) is not None:
            try:
                await self._send(link.peer, link.who.epoch, probe=pb.Probe())
            except (OSError, TimeoutError):
                link.task.cancel()  # it does not read: it may connect again

    async def _converse(self, peer: FramedSocket) -> None:
        link: _Link | None = None
        try:
            async with asyncio.timeout(HELLO_LIMIT):
                link = await self._greet(peer)
            while link is not None and (frame := await _receive(peer)) is not None:
                self._take(link, frame)
        except (OSError, TimeoutError, FramingError, DecodeError, ValueError) as error:
            _log.warning(
                "closed the link of %s: %s", link.who.key if link is not None else "an unknown engine", error or "no hello in time"
            )
        finally:
            peer.close()
            if link is not None and self._links.get((link.who.key, link.who.rank)) is link:
                del self._links[link.who.key, link.who.rank]
                self._listener.on_link_lost(link.who)

    async def _greet(self, peer: FramedSocket) -> _Link | None:
        """Raises ValueError for a first frame that is no proper Hello."""
        frame = await _receive(peer)
        if frame is None:
            return None
        if frame.WhichOneof("body") != "hello":
            raise ValueError(f"the first frame must be a hello, got {frame.WhichOneof('body')}")
        who = wire.identity(frame.engine)
        refusal = self._listener.on_hello(who, wire.hello(frame.hello))
        await self._send(peer, who.epoch, welcome=pb.Welcome(accepted=not refusal, reason=refusal))
        if refusal:
            _log.warning("refused the hello of %s, epoch %d, rank %d: %s", who.key, who.epoch, who.rank, refusal)
            return None
        task = asyncio.current_task()
        assert task is not None, "links are served by tasks"
        link = _Link(who, peer, task)
        self._links[who.key, who.rank] = link
        return link

    def _take(self, link: _Link, frame: pb.EngineFrame) -> None:
        if wire.identity(frame.engine) != link.who:
            _log.warning("dropped a frame on the link of %s: it names another engine, epoch or rank", link.who.key)
        elif (event := wire.engine_event(frame)) is not None:
            self._listener.on_event(link.who, event)

    async def _send(self, peer: FramedSocket, epoch: Epoch, *, welcome: pb.Welcome | None = None, probe: pb.Probe | None = None) -> None:
        """Raises OSError or TimeoutError when the peer is gone or does not read."""
        frame = pb.AgentFrame(agent_epoch=self._agent_epoch, engine_epoch=epoch, welcome=welcome, probe=probe)
        async with asyncio.timeout(SEND_LIMIT):
            await peer.send(frame.SerializeToString())


async def _receive(peer: FramedSocket) -> pb.EngineFrame | None:
    received = await peer.receive()
    if received is None:
        return None
    payload, fds = received
    for fd in fds:
        os.close(fd)  # engines send none; what comes anyway must not stay open here
    return pb.EngineFrame.FromString(payload)
