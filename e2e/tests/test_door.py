"""A door passes on what each side does: bytes, half ends, resets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aerostat_testing.kubernetes.nodes.door import serve
from aerostat_testing.ports import free_port
from aerostat_testing.raw_http import Peer, connect, raw_server

pytestmark = pytest.mark.cpu


@asynccontextmanager
async def door_to(port: int) -> AsyncIterator[int]:
    """The port of a door in this process."""
    listening = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(serve(listening, "127.0.0.1", port))
    try:
        yield listening.getsockname()[1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_half_end_passes_and_what_comes_after_it_from_the_other_side_too() -> None:
    async def answer_at_the_end(peer: Peer) -> None:
        said = await peer.read_rest()
        await peer.send(b"heard " + said)

    async with raw_server(answer_at_the_end) as server, door_to(server.port) as port, connect(port) as client:
        await client.send(b"all")
        client.writer.write_eof()
        assert await client.read_rest() == b"heard all"


async def test_a_reset_is_seen_as_one_by_the_other_side() -> None:
    async def break_off(peer: Peer) -> None:
        await peer.reader.readexactly(4)
        await peer.send(b"half an ans")
        peer.reset()

    async with raw_server(break_off) as server, door_to(server.port) as port, connect(port) as client:
        await client.send(b"tell")
        with pytest.raises(ConnectionResetError):
            await client.read_rest()


async def test_a_client_that_resets_is_missed_by_the_server() -> None:
    lost = asyncio.Event()

    async def wait_for_the_end(peer: Peer) -> None:
        try:
            await peer.read_rest()
        except ConnectionResetError:
            lost.set()

    async with raw_server(wait_for_the_end) as server, door_to(server.port) as port, connect(port) as client:
        await client.send(b"hello")
        client.reset()
        async with asyncio.timeout(5):
            await lost.wait()


async def test_where_nobody_listens_the_connection_is_reset() -> None:
    async with door_to(free_port()) as port, connect(port) as client:
        with pytest.raises(ConnectionResetError):
            await client.read_rest()
