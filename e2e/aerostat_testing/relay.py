"""A TCP relay on 127.0.0.1 that a test cuts: what lies between a client and a server, without a network to break."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_CHUNK: Final = 1 << 16


class Relay:
    """Passes bytes on to `port`, until `cut`; what connects while it is cut is closed at once."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._is_cut = False
        self._passing: set[asyncio.Task[None]] = set()
        self.port = 0
        self.n_connections = 0

    def cut(self) -> None:
        """Close all connections, and new ones until `mend`."""
        self._is_cut = True
        for task in self._passing:
            task.cancel()

    def mend(self) -> None:
        self._is_cut = False

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        if self._is_cut:
            writer.close()
            return
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
        except OSError:
            return  # either side hung up, and the other learns it now
        finally:
            writer.close()
            server_writer.close()

    async def close(self) -> None:
        self.cut()
        if self._passing:
            await asyncio.wait(self._passing)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def relay_to(port: int) -> AsyncIterator[Relay]:
    relay = Relay(port)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
        await server.wait_closed()
