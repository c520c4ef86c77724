"""The agent's side of the keeper's socket: one link, from Attach until it is lost.

A link is never repaired: after a loss the agent attaches anew, with a higher epoch, and adopts what the keeper lists.
"""

import asyncio
import itertools
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from aerostat.v1 import agent_pb2 as pb
from aerostat_agent.policy.memory import ContainerMemory
from aerostat_agent.site import EngineSite
from aerostat_core.errors import AerostatError, PermanentError, TemporaryError
from aerostat_core.ids import Bytes, Epoch, Seconds
from aerostat_runtime.framing import FramedSocket, FramingError

REPLY_DEADLINE: Final[Seconds] = 10.0
_RETRY_EVERY: Final[Seconds] = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptProcess:
    """`exit_code` is None while it runs, negative for a signal."""

    epoch: Epoch
    pid: int
    exit_code: int | None
    note: bytes
    log_path: Path
    started_at: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Nobody of the process's session lives any more."""

    epoch: Epoch
    exit_code: int


class KeeperRefusalError(PermanentError):
    """The keeper does not do what it was asked; its reason and message."""


class FencedError(PermanentError):
    """A newer agent commands this keeper: there is nothing left to do here."""


class Keeper(Protocol):
    """What the agent needs of a keeper. All of it raises KeeperRefusalError, FencedError or TemporaryError (the link is lost)."""

    @property
    def site(self) -> EngineSite: ...

    async def free_port(self) -> int:
        """At the site's address, for an engine that is started next."""
        ...

    async def start(
        self, *, epoch: Epoch, argv: Sequence[str], env: Mapping[str, str], log_path: Path, note: bytes, memory_limit_bytes: Bytes = 0
    ) -> int:
        """The pid."""
        ...

    async def signal(self, epoch: Epoch, signum: signal.Signals) -> None: ...

    async def forget(self, epoch: Epoch) -> None: ...

    async def list(self) -> tuple[KeptProcess, ...]: ...


class KeeperLink:
    """A `Keeper` over its socket. Use `attach`, and `close` at the end."""

    def __init__(self, sock: socket.socket) -> None:
        self._peer = FramedSocket(sock)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[pb.KeeperReply]] = {}
        self._reader = asyncio.create_task(self._read())
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()
        self.lost = asyncio.Event()
        self.fenced: FencedError | None = None  # why it is lost, where a newer agent is the reason
        self.agent_epoch = Epoch(0)
        self.keeper_epoch = Epoch(0)
        self.site = EngineSite()

    @classmethod
    async def attach(cls, path: Path, *, deadline: Seconds) -> "KeeperLink":
        """Wait for the keeper's socket and become its agent. Raises PermanentError after the deadline (seconds)."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + deadline
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                await loop.sock_connect(sock, str(path))
                break
            except OSError as error:
                sock.close()
                if loop.time() >= give_up_at:
                    message = f"no keeper answers on {path}: {error}; start `python -m aerostat_agent.keeper --socket {path}`"
                    raise PermanentError("NoKeeper", message) from error
                await asyncio.sleep(_RETRY_EVERY)
        link = cls(sock)
        try:
            attached = (await link._ask(pb.KeeperRequest(attach=pb.Attach()))).attached
        except (AerostatError, asyncio.CancelledError):
            await link.close()
            raise
        link.agent_epoch, link.keeper_epoch = Epoch(attached.agent_epoch), Epoch(attached.keeper_epoch)
        link.site = EngineSite(host=attached.engine_host, tls_dir=attached.tls_dir or None)
        return link

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._peer.close()

    async def start(
        self, *, epoch: Epoch, argv: Sequence[str], env: Mapping[str, str], log_path: Path, note: bytes, memory_limit_bytes: Bytes = 0
    ) -> int:
        start = pb.Start(epoch=epoch, argv=argv, env=env, log_path=str(log_path), note=note, memory_limit_bytes=memory_limit_bytes)
        return (await self._ask(pb.KeeperRequest(start=start))).started.pid

    async def signal(self, epoch: Epoch, signum: signal.Signals) -> None:
        await self._ask(pb.KeeperRequest(signal=pb.Signal(epoch=epoch, signal=signum)))

    async def forget(self, epoch: Epoch) -> None:
        await self._ask(pb.KeeperRequest(forget=pb.Forget(epoch=epoch)))

    async def list(self) -> tuple[KeptProcess, ...]:
        reply = await self._ask(pb.KeeperRequest(list=pb.ListProcesses()))
        return tuple(map(_kept_process, reply.processes.processes))

    async def free_port(self) -> int:
        return (await self._ask(pb.KeeperRequest(find_port=pb.FindPort()))).port.port

    async def describe(self) -> pb.DeviceList:
        return (await self._ask(pb.KeeperRequest(describe=pb.Describe()))).devices

    async def memory(self) -> ContainerMemory:
        described = await self.describe()
        return ContainerMemory(limit=described.host_memory_bytes, shared=described.shared_memory_bytes)

    async def _ask(self, request: pb.KeeperRequest) -> pb.KeeperReply:
        if self.fenced is not None:
            raise self.fenced
        if self.lost.is_set():
            raise _lost()
        request.id, request.agent_epoch = next(self._ids), self.agent_epoch
        reply: asyncio.Future[pb.KeeperReply] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = reply
        try:
            async with asyncio.timeout(REPLY_DEADLINE):
                await self._peer.send(request.SerializeToString())
                answer = await reply
        except (OSError, TimeoutError) as error:
            self.lost.set()
            raise _lost() from error
        finally:
            del self._waiting[request.id]
        if answer.error:
            reason, message = _reason_and_message(answer.error)
            raise FencedError(reason, message) if reason == "Fenced" else KeeperRefusalError(reason, message)
        return answer

    async def _read(self) -> None:
        try:
            while (received := await self._peer.receive()) is not None:
                self._take(pb.KeeperReply.FromString(received[0]))
        except (OSError, FramingError, DecodeError):
            pass  # whatever ended the link, its users learn that it is lost
        finally:
            self.lost.set()
            for reply in self._waiting.values():
                if not reply.done():
                    reply.set_exception(_lost())

    def _take(self, reply: pb.KeeperReply) -> None:
        if reply.WhichOneof("body") == "exited":
            self.exits.put_nowait(Exit(epoch=Epoch(reply.exited.epoch), exit_code=reply.exited.exit_code))
        elif reply.id == 0 and reply.error:
            self.fenced = FencedError(*_reason_and_message(reply.error))
            self.lost.set()
        elif (waiting := self._waiting.get(reply.id)) is not None and not waiting.done():
            waiting.set_result(reply)


def _reason_and_message(error: str) -> tuple[str, str]:
    reason, _, message = error.partition(": ")
    return reason, message


def _kept_process(info: pb.ProcessInfo) -> KeptProcess:
    return KeptProcess(
        epoch=Epoch(info.epoch),
        pid=info.pid,
        exit_code=None if info.running else info.exit_code,
        note=info.note,
        log_path=Path(info.log_path),
        started_at=info.started_at,
    )


def _lost() -> TemporaryError:
    return TemporaryError("KeeperLost", "the keeper's socket closed", retry_after=_RETRY_EVERY)
