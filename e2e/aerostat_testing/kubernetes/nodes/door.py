"""A door from the test's network into the cluster's, for clients that know nothing of either.

A socket stays in the network where it was made. The test makes one that listens on its own 127.0.0.1 and hands it to a child
inside the cluster, `python -m aerostat_testing.kubernetes.nodes.door FD PARENT HOST PORT`, which accepts there and connects to a
Service or a pod. What one side does, the other side sees: an end, a half end, a reset.
"""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from typing import Final, Self

from aerostat_core.ids import Seconds
from aerostat_runtime.process import die_with_parent
from aerostat_testing.kubernetes.nodes.cluster import PLANE, Nodes
from aerostat_testing.leaks import OUTLIVES_TESTS

_CHUNK: Final = 1 << 16
_END_LIMIT: Final[Seconds] = 10.0
_CONNECT_LIMIT: Final[Seconds] = 10.0
_RESET_AT_CLOSE: Final = struct.pack("ii", 1, 0)


class Door:
    """Context manager; entered in the test's main thread, whose end the child goes by. `address`: where clients call."""

    def __init__(self, nodes: Nodes, host: str, port: int, *, node: str = PLANE) -> None:
        """`node`: from whose network the child connects."""
        self._nodes, self._node, self._to = nodes, node, (host, str(port))
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
            self.address = f"127.0.0.1:{listening.getsockname()[1]}"
            arguments = [str(listening.fileno()), str(os.getpid()), *self._to]
            command = self._nodes.command(sys.executable, "-m", __name__, *arguments, node=self._node)
            environment = os.environ | {OUTLIVES_TESTS: "1"}
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[listening.fileno()])
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(_END_LIMIT)

    @property
    def url(self) -> str:
        return f"http://{self.address}"


async def serve(listening: socket.socket, host: str, port: int) -> None:
    passing: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(_pass_on(reader, writer, host, port))
        passing.add(task)
        task.add_done_callback(passing.discard)

    server = await asyncio.start_server(accept, sock=listening)
    try:
        await server.serve_forever()
    finally:
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    writers = [writer]
    try:
        async with asyncio.timeout(_CONNECT_LIMIT):
            far_reader, far_writer = await asyncio.open_connection(host, port)
        writers.append(far_writer)
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
    except (OSError, asyncio.CancelledError):  # nobody answers there, one side was reset, or the door closes
        for each in writers:
            _reset(each)
    else:
        for each in writers:
            each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """So that a client does not take what it has for the whole."""
    if not writer.transport.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        writer.transport.abort()


def main() -> None:
    fd, parent, host, port = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGKILL)
    asyncio.run(serve(socket.socket(fileno=int(fd)), host, int(port)))


if __name__ == "__main__":
    main()
