"""The keeper's socket: many may connect, only the agent that attached last commands; events go to it alone."""

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from aerostat.v1 import agent_pb2 as pb
from aerostat_agent.keeper import wire
from aerostat_agent.keeper.processes import Process, ProcessTable
from aerostat_agent.ports import free_port
from aerostat_agent.site import EngineSite
from aerostat_core.clock import Clock
from aerostat_core.errors import PermanentError
from aerostat_core.ids import Epoch, Seconds
from aerostat_runtime.framing import FramedSocket, FramingError

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 32
SEND_DEADLINE: Final[Seconds] = 5.0  # a peer that does not read for so long is cut off; it attaches and lists again


class KeeperServer:
    """Serves the process table. `agent_epoch` grows with each Attach; requests of older epochs are refused."""

    def __init__(self, table: ProcessTable, clock: Clock, site: EngineSite) -> None:
        self._table = table
        self._clock = clock
        self._site = site
        self._keeper_epoch = _wall_epoch(clock)
        self._agent_epoch = Epoch(0)
        self._commander: FramedSocket | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._farewells: set[asyncio.Task[bool]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept until cancelled; connections end with it."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                sock, _ = await loop.sock_accept(listener)
                if len(self._connections) >= MAX_CONNECTIONS:
                    _log.warning("refused a connection: %d are open", len(self._connections))
                    sock.close()
                    continue
                connection = asyncio.create_task(self._converse(FramedSocket(sock)))
                self._connections.add(connection)
                connection.add_done_callback(self._connections.discard)
        finally:
            tasks: list[asyncio.Task[Any]] = [*self._connections, *self._farewells]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def report(self, gone: Process) -> None:
        _log.info("process %d (epoch %d) is gone, exit code %s", gone.pid, gone.epoch, gone.exit_code)
        if self._commander is not None:
            await _send(self._commander, wire.exited(gone))

    async def _converse(self, peer: FramedSocket) -> None:
        try:
            while (received := await peer.receive()) is not None:
                payload, fds = received
                _close_all(fds)
                request = pb.KeeperRequest.FromString(payload)
                reply = self._answer(peer, request)
                reply.id = request.id
                if not await _send(peer, reply):
                    return
        except (OSError, FramingError, DecodeError) as error:
            _log.warning("closed a connection: %s", error)
        finally:
            if self._commander is peer:
                self._commander = None
            peer.close()

    def _answer(self, peer: FramedSocket, request: pb.KeeperRequest) -> pb.KeeperReply:
        if request.WhichOneof("body") == "attach":
            self._agent_epoch = Epoch(max(self._agent_epoch + 1, _wall_epoch(self._clock)))
            if self._commander is not None and self._commander is not peer:
                self._in_background(_send(self._commander, self._fenced()))
            self._commander = peer
            _log.info("agent epoch %d attached", self._agent_epoch)
            return wire.attached(self._agent_epoch, self._keeper_epoch, self._site)
        if request.agent_epoch != self._agent_epoch or peer is not self._commander:
            return self._fenced()
        try:
            return self._execute(request)
        except PermanentError as error:
            _log.warning("%s: %s", error.reason, error.message)
            return pb.KeeperReply(error=f"{error.reason}: {error.message}")

    def _fenced(self) -> pb.KeeperReply:
        return pb.KeeperReply(error=f"Fenced: the agent of epoch {self._agent_epoch} commands here now")

    def _in_background(self, send: Coroutine[None, None, bool]) -> None:
        task = asyncio.create_task(send)
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    def _execute(self, request: pb.KeeperRequest) -> pb.KeeperReply:
        match request.WhichOneof("body"):
            case "start":
                return pb.KeeperReply(started=pb.Started(pid=self._start(request.start).pid))
            case "signal":
                _log.info("signal %d to epoch %d", request.signal.signal, request.signal.epoch)
                self._table.signal(Epoch(request.signal.epoch), request.signal.signal)
                return pb.KeeperReply(done=pb.Done())
            case "list":
                return pb.KeeperReply(processes=pb.ProcessList(processes=map(wire.process_info, self._table)))
            case "forget":
                self._table.forget(Epoch(request.forget.epoch))
                return pb.KeeperReply(done=pb.Done())
            case "find_port":
                return pb.KeeperReply(port=pb.FreePort(port=self._free_port()))
            case "describe":
                return pb.KeeperReply(devices=wire.devices())
            case _:
                raise PermanentError("UnknownRequest", "the request has no body that this keeper knows: agent and keeper versions differ")

    def _free_port(self) -> int:
        try:
            return free_port(self._site.host)
        except OSError as error:
            raise PermanentError("NoFreePort", f"no port is to be had on {self._site.host}: {error.strerror}") from error

    def _start(self, start: pb.Start) -> Process:
        process = self._table.start(
            epoch=Epoch(start.epoch),
            argv=tuple(start.argv),
            env=dict(start.env),
            log_path=Path(start.log_path),
            note=start.note,
            memory_limit_bytes=start.memory_limit_bytes,
            now=self._clock.wall(),
        )
        _log.info("started %s as process %d (epoch %d)", " ".join(start.argv[:3]), process.pid, process.epoch)
        return process


def _wall_epoch(clock: Clock) -> Epoch:
    return Epoch(int(clock.wall() * 1000))


def _close_all(fds: tuple[int, ...]) -> None:
    """No request carries descriptors; what a peer sends anyway must not stay open here."""
    for fd in fds:
        os.close(fd)


async def _send(peer: FramedSocket, reply: pb.KeeperReply) -> bool:
    """False: the peer is gone, or does not read; its connection is of no use any more."""
    try:
        async with asyncio.timeout(SEND_DEADLINE):
            await peer.send(reply.SerializeToString())
    except (OSError, TimeoutError) as error:
        _log.warning("lost a connection: %s", error or "it does not read")
        return False
    return True
