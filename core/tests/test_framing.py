"""Frames survive any splitting of the stream, and each descriptor arrives with the frame that carried it."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_runtime.framing import MAX_FDS, MAX_FRAME_BYTES, FrameDecoder, FramedSocket, FramingError, encode

pytestmark = pytest.mark.cpu


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with ExitStack() as stack:
        a, b = (stack.enter_context(sock) for sock in socket.socketpair())
        yield a, b


def marked_fds(*marks: bytes) -> tuple[int, ...]:
    """A descriptor for each mark, from which the mark can be read."""
    fds = []
    for mark in marks:
        fd = os.memfd_create("mark")
        os.pwrite(fd, mark, 0)
        fds.append(fd)
    return tuple(fds)


def marks_of(fds: tuple[int, ...]) -> list[bytes]:
    """Reads and closes them."""
    try:
        return [os.pread(fd, 100, 0) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_frames_survive_any_splitting(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(encode, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = FrameDecoder()
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [frame for piece in pieces for frame in decoder.feed(piece)] == frames


def test_frames_survive_a_split_at_every_byte() -> None:
    frames = [b"", b"x", b"longer than its header", b""]
    stream = b"".join(map(encode, frames))
    for cut in range(len(stream) + 1):
        decoder = FrameDecoder()
        assert [*decoder.feed(stream[:cut]), *decoder.feed(stream[cut:])] == frames
    decoder = FrameDecoder()
    assert [frame for i in range(len(stream)) for frame in decoder.feed(stream[i : i + 1])] == frames


def test_a_frame_over_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(FramingError, match="at most"):
        encode(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(FramingError, match="the peer announces"):
        list(FrameDecoder().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


async def test_both_directions_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = map(FramedSocket, pair)
    sent = [bytes([i]) * size for i, size in enumerate((0, 1, 1000, 300_000, 3 << 20, 5))]

    async def send_all(to: FramedSocket) -> None:
        for frame in sent:
            await to.send(frame)

    async def receive_all(end: FramedSocket) -> list[bytes]:
        return [frame for frame, _ in [await _next(end) for _ in sent]]

    async with asyncio.timeout(20):
        _, _, at_b, at_a = await asyncio.gather(send_all(a), send_all(b), receive_all(b), receive_all(a))
    assert at_a == sent
    assert at_b == sent


async def test_frames_of_several_writers_do_not_mix(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = map(FramedSocket, pair)
    frames = [bytes([i]) * 200_000 for i in range(8)]
    async with asyncio.timeout(20), asyncio.TaskGroup() as writers:
        for frame in frames:
            writers.create_task(a.send(frame))
        received = await _receive(b, len(frames))
    assert sorted(frame for frame, _ in received) == frames


async def test_descriptors_arrive_with_their_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    """Also when several frames arrive in one read: before, between and after frames without any."""
    a, b = map(FramedSocket, pair)
    sent: list[tuple[bytes, tuple[bytes, ...]]] = [
        (b"none", ()),
        (b"none either", ()),
        (b"two", (b"1", b"2")),
        (b"large", (b"3",)),
        (b"", (b"4",)),
        (b"none again", ()),
        (b"last", (b"5",)),
    ]
    sent[3] = (bytes(20_000), (b"3",))
    async with asyncio.timeout(20):
        for frame, marks in sent:
            fds = marked_fds(*marks)
            await a.send(frame, fds)
            marks_of(fds)
        received = await _receive(b, len(sent))
    assert [(frame, tuple(marks_of(fds))) for frame, fds in received] == sent


async def test_descriptors_of_a_frame_in_pieces_wait_for_its_end(pair: tuple[socket.socket, socket.socket]) -> None:
    raw, b = pair[0], FramedSocket(pair[1])
    fds = marked_fds(b"x")
    frame = encode(b"payload")
    raw.sendall(encode(b"before"))
    socket.send_fds(raw, [frame[:3]], list(fds))
    marks_of(fds)
    async with asyncio.timeout(20):
        assert await b.receive() == (b"before", ())
        raw.sendall(frame[3:] + encode(b"after"))
        payload, received = await _next(b)
        assert (payload, marks_of(received)) == (b"payload", [b"x"])
        assert await b.receive() == (b"after", ())


async def test_as_many_descriptors_as_the_kernel_takes(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = map(FramedSocket, pair)
    (fd,) = marked_fds(b"m")
    await a.send(b"many", (fd,) * MAX_FDS)
    with pytest.raises(FramingError, match="at most 253 descriptors"):
        await a.send(b"too many", (fd,) * (MAX_FDS + 1))
    os.close(fd)
    _, received = await _next(b)
    assert marks_of(received) == [b"m"] * MAX_FDS


async def test_received_descriptors_do_not_leak_into_children(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = map(FramedSocket, pair)
    fds = marked_fds(b"m")
    await a.send(b"", fds)
    _, received = await _next(b)
    assert not os.get_inheritable(received[0])
    marks_of(fds + received)


async def test_a_peer_that_closed_is_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = map(FramedSocket, pair)
    await a.send(b"last words")
    a.close()
    assert await b.receive() == (b"last words", ())
    assert await b.receive() is None
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on timing
        await b.send(b"to nobody")


async def test_what_never_became_a_frame_holds_no_descriptor(pair: tuple[socket.socket, socket.socket]) -> None:
    raw, b = pair[0], FramedSocket(pair[1])
    fds = marked_fds(b"x")
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(raw, [encode(b"payload")[:3]], list(fds))
    raw.close()
    assert await b.receive() is None
    b.close()
    marks_of(fds)
    assert len(os.listdir("/proc/self/fd")) == before - 3  # both ends and our own


async def test_a_cancelled_receive_loses_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    raw, b = pair[0], FramedSocket(pair[1])
    frame = encode(b"payload")
    raw.sendall(frame[:5])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await b.receive()
    raw.sendall(frame[5:])
    assert await b.receive() == (b"payload", ())


async def _next(end: FramedSocket) -> tuple[bytes, tuple[int, ...]]:
    received = await end.receive()
    assert received is not None
    return received


async def _receive(end: FramedSocket, n: int) -> list[tuple[bytes, tuple[int, ...]]]:
    return [await _next(end) for _ in range(n)]
