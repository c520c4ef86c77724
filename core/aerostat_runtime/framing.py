"""Frames on a node's Unix sockets: 4 bytes of length (little endian), then that many bytes; descriptors ride beside.

`FrameDecoder` is the codec alone, for threads that own a blocking socket (the engine). `FramedSocket` is the same
for asyncio (agent, keeper). Both bound what they buffer; neither knows what a frame means.
"""

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Final

from aerostat_core.errors import AerostatError

MAX_FRAME_BYTES: Final = 16 << 20
MAX_FDS: Final = 253  # the kernel's SCM_MAX_FD
_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 << 10
_FD_SIZE = array.array("i").itemsize


class FramingError(AerostatError):
    """The peer does not speak frames, or speaks too large ones: the connection is of no use any more."""


def encode(payload: bytes) -> bytes:
    """Raises FramingError when the payload is too large for a frame."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FramingError(f"a frame takes at most {MAX_FRAME_BYTES} bytes, got {len(payload)}")
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Bytes in as they come, whole frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Frames that are complete now. Raises FramingError for a length over the limit."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (n,) = _LENGTH.unpack_from(self._buffer)
            if n > MAX_FRAME_BYTES:
                raise FramingError(f"a frame takes at most {MAX_FRAME_BYTES} bytes, the peer announces {n}")
            end = _LENGTH.size + n
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield frame

    def is_inside_frame(self) -> bool:
        """Whether the last byte was of a frame that is not complete yet."""
        return bool(self._buffer)


class FramedSocket:
    """One connected Unix stream socket, used by one reader task and any number of writers.

    A read ends with the piece that descriptors came with, so they belong to the frame that has the read's last byte.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = FrameDecoder()
        self._frames: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._fds: tuple[int, ...] = ()  # of the frame that is not complete yet
        self._send_lock = asyncio.Lock()

    async def send(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Raises OSError when the peer is gone."""
        if len(fds) > MAX_FDS:
            raise FramingError(f"a frame carries at most {MAX_FDS} descriptors, got {len(fds)}")
        data = memoryview(encode(payload))
        async with self._send_lock:
            if fds:
                await self._writable()
                data = data[socket.send_fds(self._sock, [data], list(fds)) :]
            await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def receive(self) -> tuple[bytes, tuple[int, ...]] | None:
        """The next frame and its descriptors (the caller owns them); None when the peer closed."""
        while not self._frames:
            data, fds = await self._recv()
            if not data:
                return None
            self._take(data, fds)
        return self._frames.popleft()

    def close(self) -> None:
        """Closes the descriptors too that nobody received."""
        self._sock.close()
        for fd in (*self._fds, *(fd for _, fds in self._frames for fd in fds)):
            os.close(fd)
        self._fds = ()
        self._frames.clear()

    def _take(self, data: bytes, fds: tuple[int, ...]) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._frames.append((frame, self._fds))
                self._fds = ()
        except FramingError:
            self._fds += fds  # for `close`
            raise
        if self._decoder.is_inside_frame():
            self._fds += fds
        elif fds:
            frame, earlier = self._frames.pop()
            self._frames.append((frame, earlier + fds))

    async def _recv(self) -> tuple[bytes, tuple[int, ...]]:
        while True:
            try:  # not socket.recv_fds, which drops the flags in Python 3.11: children would inherit the descriptors
                data, messages, _, _ = self._sock.recvmsg(_READ_BYTES, socket.CMSG_SPACE(MAX_FDS * _FD_SIZE), socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await self._readable()
            else:
                return data, tuple(fd for message in messages for fd in _fds_in(message))

    async def _readable(self) -> None:
        await _ready(self._sock, writing=False)

    async def _writable(self) -> None:
        await _ready(self._sock, writing=True)


def _fds_in(message: tuple[int, int, bytes]) -> "array.array[int]":
    level, kind, data = message
    fds = array.array("i")
    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
        fds.frombytes(data[: len(data) - len(data) % _FD_SIZE])
    return fds


async def _ready(sock: socket.socket, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(sock, ready.set)
    try:
        await ready.wait()
    finally:
        remove(sock)
