"""One call that came by gRPC: it goes through the same dispatch, and its answer is read from the engine as events of JSON."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final

import orjson

from aerostat_core import api_errors
from aerostat_core.api_errors import ApiError
from aerostat_core.clock import Clock
from aerostat_router.calls import Call, Result, Target
from aerostat_router.dispatch import Dispatcher
from aerostat_router.engine_request import engine_request, read_usage
from aerostat_router.http.answer import Answer, UpstreamError, open_answer
from aerostat_router.http.exchange import MAX_REFUSAL_BYTES, Outcome
from aerostat_router.http.stream_call import StreamCaller
from aerostat_router.intake import Intake
from aerostat_router.request_body import Api, RejectedError, read_body

MAX_ANSWER_BYTES: Final = 64 << 20
Event = dict[str, Any]


class GrpcCarrier:
    """`calls.Carrier`: what dispatch says is awaited here, one step at a time."""

    def __init__(self) -> None:
        self._steps: asyncio.Queue[Target | ApiError] = asyncio.Queue()

    def forward(self, target: Target) -> None:
        self._steps.put_nowait(target)

    def refuse(self, error: ApiError) -> None:
        self._steps.put_nowait(error)

    async def target(self) -> Target:
        """Where to try next. Raises RejectedError when the call is refused. Waits no longer than the call's hold budget."""
        step = await self._steps.get()
        if isinstance(step, ApiError):
            raise RejectedError(step)
        return step

    def check(self) -> None:
        """Of a call that is over. Raises RejectedError when a refusal ended it."""
        if not self._steps.empty() and isinstance(step := self._steps.get_nowait(), ApiError):
            raise RejectedError(step)


class GrpcCalls:
    def __init__(self, *, router: str, dispatcher: Dispatcher, intake: Intake, caller: StreamCaller, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._intake = intake
        self._caller = caller
        self._clock = clock
        self._ids = (f"grpc-{router}-{n}" for n in itertools.count(1))

    async def run(self, api: Api, headers: Mapping[bytes, bytes], document: Event) -> AsyncGenerator[tuple[str, Target, Event], None]:
        """Request id, target, and each JSON document of the answer: the events of a stream, or the one body.

        Raises RejectedError. Leaving the iteration early, as a cancelled RPC does, aborts the engine's call.
        """
        request_id = next(self._ids)
        body = orjson.dumps(document)
        carrier = GrpcCarrier()
        call = self._intake.admit(api, headers, read_body(api, body), len(body), carrier, self._clock.monotonic())
        self._dispatcher.submit(call)
        try:
            while not call.is_over:
                target = await carrier.target()
                async with aclosing(self._try(api, call, target, headers, body, request_id)) as events:
                    async for event in events:
                        yield request_id, target, event
            carrier.check()
        finally:
            if call.ticket is not None:
                self._dispatcher.end(call, Result(Outcome.ABANDONED))
            self._dispatcher.abandon(call)

    async def _try(
        self, api: Api, call: Call, target: Target, headers: Mapping[bytes, bytes], body: bytes, request_id: str
    ) -> AsyncGenerator[Event, None]:
        request = engine_request(api, target, call.session, headers, body, request_id.encode(), is_spilled=target.model is not call.model)
        usage: Event | None = None
        status: int | None = None
        try:
            async with open_answer(self._caller, target.endpoint, request) as answer:
                status = answer.status
                if status >= 400:
                    refusal = await answer.read(MAX_REFUSAL_BYTES)
                    self._dispatcher.end(call, Result(Outcome.REFUSED, status, refusal=refusal))
                    return
                async for event in _documents(answer):
                    if call.first_byte_at is None:
                        self._dispatcher.first_byte(call)
                    usage = event.get("usage") or usage
                    yield event
        except UpstreamError as lost:
            outcome = Outcome.UNREACHED if call.first_byte_at is None else Outcome.BROKEN
            self._dispatcher.end(call, Result(outcome, status, lost.failure))
            if outcome is Outcome.BROKEN:
                raise RejectedError(api_errors.upstream_disconnected(call.model.served_name)) from lost
            return
        except RejectedError:
            self._dispatcher.end(call, Result(Outcome.BROKEN, status))
            raise
        self._dispatcher.end(call, Result(Outcome.DONE, status, usage=read_usage(usage)))


async def _documents(answer: Answer) -> AsyncIterator[Event]:
    """Raises RejectedError for an error that the engine put into its stream."""
    kind = answer.head.header(b"content-type") or b""
    if not kind.startswith(b"text/event-stream"):
        yield orjson.loads(await answer.read(MAX_ANSWER_BYTES))
        return
    async for data in answer.events():
        if data == b"[DONE]":
            return
        event = orjson.loads(data)
        if "error" in event:
            message = event["error"].get("message", "no reason given") if isinstance(event["error"], dict) else str(event["error"])
            raise RejectedError(ApiError(status=500, type="server_error", code="engine_error", message=message))
        yield event
