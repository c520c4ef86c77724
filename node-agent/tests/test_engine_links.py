"""The agent's end of the engines' socket: hello first, identity always, garbage ends a link and nothing else."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aerostat.v1 import agent_pb2 as pb
from aerostat_agent import engine_link
from aerostat_agent.engine_events import Boundary, EngineEvent, Hello, Identity
from aerostat_agent.engine_link import EngineLinks
from aerostat_agent.policy.tracks import EngineKey
from aerostat_agent.unix_socket import listen
from aerostat_core.errors import SettingError
from aerostat_core.ids import Epoch, ModelName, NamespacedName
from aerostat_runtime.framing import FramedSocket, encode

pytestmark = pytest.mark.cpu

KEY = EngineKey(NamespacedName("default", "cpu-0"), ModelName("a"))
ME = pb.EngineIdentity(instance="default/cpu-0", model="a", engine_epoch=7)


class Listener:
    """Welcomes epoch 7."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[object] = asyncio.Queue()

    def on_hello(self, who: Identity, hello: Hello) -> str:
        if who.epoch != 7:
            return "an older run"
        self.heard.put_nowait(("hello", who.rank))
        return ""

    def on_event(self, who: Identity, event: EngineEvent) -> None:
        self.heard.put_nowait(event)

    def on_link_lost(self, who: Identity) -> None:
        self.heard.put_nowait(("lost", who.rank))

    async def next(self) -> object:
        return await asyncio.wait_for(self.heard.get(), 5)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "agent.sock"
        self.listener = Listener()
        self.links = EngineLinks(self.listener, Epoch(3))

    @asynccontextmanager
    async def engine(self) -> AsyncGenerator[FramedSocket, None]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await asyncio.get_running_loop().sock_connect(sock, str(self.path))
        peer = FramedSocket(sock)
        try:
            yield peer
        finally:
            peer.close()


@asynccontextmanager
async def serving(folder: Path) -> AsyncGenerator[Rig, None]:
    rig = Rig(folder)
    listener = listen(rig.path)
    task = asyncio.create_task(rig.links.serve(listener.sock))
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


async def send(peer: FramedSocket, **body: object) -> None:
    frame = pb.EngineFrame(**({"engine": ME} | body))  # type: ignore[arg-type]
    await peer.send(frame.SerializeToString())


async def answer(peer: FramedSocket) -> pb.AgentFrame | None:
    received = await asyncio.wait_for(peer.receive(), 5)
    return None if received is None else pb.AgentFrame.FromString(received[0])


async def test_an_engine_is_welcomed_heard_asked_and_missed(tmp_path: Path) -> None:
    async with serving(tmp_path) as rig:
        async with rig.engine() as peer:
            await send(peer, hello=pb.Hello(tensor_parallel=1))
            welcome = await answer(peer)
            assert welcome is not None
            assert (welcome.agent_epoch, welcome.engine_epoch, welcome.welcome.accepted) == (3, 7, True)
            assert await rig.listener.next() == ("hello", 0)
            await send(peer, boundary=pb.Boundary(running=2, waiting=1))
            assert await rig.listener.next() == Boundary(running=2, waiting=1)
            await rig.links.ask_boundary(KEY)
            asked = await answer(peer)
            assert asked is not None
            assert asked.WhichOneof("body") == "probe"
        assert await rig.listener.next() == ("lost", 0)
        await rig.links.ask_boundary(KEY)  # nobody there: no error


async def test_an_engine_of_another_epoch_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with serving(tmp_path) as rig, rig.engine() as peer:
        await send(peer, engine=pb.EngineIdentity(instance="default/cpu-0", model="a", engine_epoch=6), hello=pb.Hello(tensor_parallel=1))
        refused = await answer(peer)
        assert refused is not None
        assert (refused.welcome.accepted, refused.welcome.reason) == (False, "an older run")
        assert await answer(peer) is None


@pytest.mark.parametrize(
    "first",
    [
        b"\xff\xff\xff\xff",
        encode(b"\xff no protobuf"),
        encode(pb.EngineFrame(engine=ME, boundary=pb.Boundary()).SerializeToString()),
        encode(pb.EngineFrame(engine=pb.EngineIdentity(instance="no-namespace"), hello=pb.Hello()).SerializeToString()),
    ],
    ids=["length", "protobuf", "no hello", "identity"],
)
async def test_a_first_frame_that_is_no_hello_ends_the_link(tmp_path: Path, first: bytes) -> None:
    async with serving(tmp_path) as rig:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(5)
            await asyncio.to_thread(peer.connect, str(rig.path))
            peer.sendall(first)
            assert await asyncio.to_thread(peer.recv, 1) == b""
        async with rig.engine() as good:  # and the next one is served
            await send(good, hello=pb.Hello(tensor_parallel=1))
            assert await answer(good) is not None
        assert rig.listener.heard.get_nowait() == ("hello", 0)


async def test_a_peer_that_says_nothing_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "HELLO_LIMIT", 0.1)
    async with serving(tmp_path) as rig, rig.engine() as peer:
        assert await answer(peer) is None


async def test_a_frame_that_names_another_engine_is_dropped(tmp_path: Path) -> None:
    async with serving(tmp_path) as rig, rig.engine() as peer:
        await send(peer, hello=pb.Hello(tensor_parallel=1))
        await answer(peer)
        await rig.listener.next()
        await send(peer, engine=pb.EngineIdentity(instance="default/cpu-0", model="b", engine_epoch=7), boundary=pb.Boundary(running=9))
        await send(peer, boundary=pb.Boundary(running=1))
        assert await rig.listener.next() == Boundary(running=1)


async def test_a_body_of_a_newer_engine_is_ignored(tmp_path: Path) -> None:
    async with serving(tmp_path) as rig, rig.engine() as peer:
        await send(peer, hello=pb.Hello(tensor_parallel=1))
        await answer(peer)
        await rig.listener.next()
        await send(peer)
        await send(peer, unhealthy=pb.Unhealthy(why="x"))
        assert "x" in str(await rig.listener.next())


async def test_a_socket_path_that_is_too_long_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="at most 107 bytes"):
        listen(tmp_path / ("x" * 120))
