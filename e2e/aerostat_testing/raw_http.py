"""HTTP by hand, for tests of the router's data path: peers that send any bytes in any pieces, misbehave and hang up on purpose.

Real sockets on loopback (`raw_server`, `connect`), and a transport without one for virtual time. Knows nothing of the router.
"""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

WAIT_S = 10.0  # no wait of a test is longer than this


@dataclass(frozen=True, slots=True, kw_only=True)
class RawMessage:
    """A parsed request or response. `start` is the first line; names are lower case; repeated fields keep the last value."""

    start: str
    headers: dict[str, str]
    body: bytes

    @property
    def status(self) -> int:
        return int(self.start.split(" ")[1])


class Peer:
    """One end of a connection, whichever side it is on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        """Each piece leaves before the next is written, so that they arrive apart more often than not."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(0.002)

    async def read_message(self, *, has_body: bool = True) -> RawMessage:
        """A request or response, its transfer coding removed. Raises IncompleteReadError where the peer breaks it off."""
        async with asyncio.timeout(WAIT_S):
            text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            start, *lines = text[:-4].split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await self._read_body(headers, is_response=start.startswith("HTTP/")) if has_body else b""
        return RawMessage(start=start, headers=headers, body=body)

    async def _read_body(self, headers: dict[str, str], *, is_response: bool) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while True:
                n = int((await self.reader.readline()).split(b";")[0], 16)
                body += (await self.reader.readexactly(n + 2))[:n]
                if n == 0:
                    return body
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        return await self.reader.read() if is_response else b""

    async def read_rest(self) -> bytes:
        """All bytes until the other side closes. Raises ConnectionResetError when it does so hard."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()

    async def wait_until_gone(self) -> None:
        """Until the other side has closed, in whatever way."""
        with suppress(ConnectionError):
            await self.read_rest()

    def reset(self) -> None:
        """Closes with RST, as a killed process with unread data does."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()


Script = Callable[[Peer], Awaitable[None]]


@dataclass(slots=True)
class RawServer:
    port: int = 0
    n_accepted: int = 0
    failures: list[BaseException] = field(default_factory=list)


@asynccontextmanager
async def raw_server(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    """Runs `script` on every connection, then closes it. What a script raises, but for a lost connection, fails the test at the end."""
    state = RawServer()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.n_accepted += 1
        peer = Peer(reader, writer)
        try:
            await script(peer)
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            pass
        except Exception as failure:
            state.failures.append(failure)
        finally:
            await peer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    state.port = server.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        ended = asyncio.ensure_future(server.wait_closed())  # begun before `close`: after it, Python 3.11 waits for no connection
        await asyncio.sleep(0)
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(WAIT_S):
            await ended
    if state.failures:
        raise state.failures[0]


@asynccontextmanager
async def connect(port: int, tls: ssl.SSLContext | None = None, *, name: str | None = None) -> AsyncIterator[Peer]:
    """By TLS, `name` is that of the server. A client learns with its first read that it was refused."""
    peer = Peer(*await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name))
    try:
        yield peer
    finally:
        await peer.close()


class FakeTransport(asyncio.Transport):
    """A transport without a socket: keeps what is written, and reports the loss in the loop's next turn, as real ones do."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.is_reading_now = True
        self.has_written_eof = False
        self.was_aborted = False
        self.unsent_bytes = 0  # what a slow peer has not taken yet; a test sets it
        self._is_closing = False
        protocol.connection_made(self)

    def take(self) -> bytes:
        written = bytes(self.written)
        self.written.clear()
        return written

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_written_eof = True

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.is_reading_now = False

    def resume_reading(self) -> None:
        self.is_reading_now = True

    def close(self) -> None:
        self._lose(None)

    def abort(self) -> None:
        self.was_aborted = True
        self._lose(None)

    def lose(self, exc: Exception | None = None) -> None:
        """The other side goes away: an end of stream, or a reset when `exc` is given."""
        if exc is None and not self._is_closing:
            self.protocol.eof_received()
        self._lose(exc)

    def _lose(self, exc: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, exc)
