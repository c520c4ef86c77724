"""`stream_call` for code that would rather await: transcoding to gRPC, probes, tests. The same port, the same pool, one queue more.

async with open_answer(pool, endpoint, CallRequest(b"POST", b"/v1/completions", headers, body)) as answer:
    async for event in answer.events(): ...
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aerostat_core.errors import TemporaryError
from aerostat_core.ids import Seconds
from aerostat_router.http.messages import ResponseHead
from aerostat_router.http.sse import EventReader
from aerostat_router.http.stream_call import Call, CallRequest, Endpoint, Failure, StreamCaller

MAX_QUEUED_BYTES = 256 << 10  # beyond this the upstream is paused until the reader has caught up


class UpstreamError(TemporaryError):
    """The call failed; `failure` says how. What was read so far stands."""

    def __init__(self, failure: Failure) -> None:
        super().__init__("UpstreamFailed", f"The upstream failed: {failure.detail}. Try again, or elsewhere.", retry_after=1)
        self.failure = failure


class Answer:
    """One answer as it arrives. Also the sink that fills it; only its reader awaits."""

    def __init__(self) -> None:
        self._head: ResponseHead | None = None
        self._queue: deque[bytes] = deque()
        self._n_queued = 0
        self._is_done = False
        self._failure: Failure | None = None
        self._changed = asyncio.Event()
        self._call: Call | None = None

    @property
    def head(self) -> ResponseHead:
        if self._head is None:
            raise RuntimeError("no head yet: an answer is given by open_answer once its head is there")
        return self._head

    @property
    def status(self) -> int:
        return self.head.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, in pieces as they came. Raises UpstreamError where it breaks off, after what had come."""
        while True:
            while self._queue:
                piece = self._queue.popleft()
                self._n_queued -= len(piece)
                if not self._queue and self._call is not None:
                    self._call.resume()
                yield piece
            if self._failure is not None:
                raise UpstreamError(self._failure)
            if self._is_done:
                return
            await self._wait()

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each server-sent event."""
        reader = EventReader()
        async for piece in self.chunks():
            for event in reader.feed(piece):
                yield event

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises ValueError past `max_bytes`."""
        body = bytearray()
        async for piece in self.chunks():
            body += piece
            if len(body) > max_bytes:
                raise ValueError(f"the answer is larger than {max_bytes} bytes")
        return bytes(body)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _wait_for_head(self) -> None:
        while self._head is None:
            if self._failure is not None:
                raise UpstreamError(self._failure)
            await self._wait()

    # CallSink.

    def on_head(self, head: ResponseHead) -> None:
        self._head = head
        self._changed.set()

    def on_data(self, data: bytes) -> None:
        self._queue.append(data)
        self._n_queued += len(data)
        if self._n_queued > MAX_QUEUED_BYTES and self._call is not None:
            self._call.pause()
        self._changed.set()

    def on_done(self) -> None:
        self._is_done = True
        self._changed.set()

    def on_failure(self, failure: Failure) -> None:
        self._failure = failure
        self._changed.set()


@asynccontextmanager
async def open_answer(
    caller: StreamCaller, endpoint: Endpoint, request: CallRequest, *, head_timeout_s: Seconds | None = None
) -> AsyncIterator[Answer]:
    """Gives the answer once its head is there; leaving the block cancels what is still running. Raises UpstreamError."""
    answer = Answer()
    call = answer._call = caller.stream_call(endpoint, request, answer, head_timeout_s=head_timeout_s)
    try:
        await answer._wait_for_head()
        yield answer
    finally:
        call.cancel()
