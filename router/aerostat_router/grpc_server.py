"""`aerostat.v1.Inference` over the same dispatch as HTTP, with the standard health and reflection services.

Errors become status codes, with the typed reason of the HTTP API in the trailer `aerostat-error-code`.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from aerostat.v1 import inference_pb2 as pb
from aerostat.v1 import inference_pb2_grpc
from aerostat_core.addresses import Address
from aerostat_core.api_errors import ApiError
from aerostat_core.errors import SettingError
from aerostat_router.calls import Target
from aerostat_router.catalog import Catalog
from aerostat_router.engine_request import read_usage
from aerostat_router.grpc_call import Event, GrpcCalls
from aerostat_router.request_body import Api, RejectedError

_CODES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_INFERENCE: Final = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_MAX_MESSAGE: Final = 64 << 20
Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self, calls: GrpcCalls, catalog: Catalog) -> None:
        self._calls = calls
        self._catalog = catalog

    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatReply:
        request_id, target, answer = await self._whole(Api.CHAT, _chat(request), request.options, context)
        choice = _choice(answer)
        message = choice.get("message") or {}
        return pb.ChatReply(
            message=pb.ChatMessage(role=message.get("role") or "assistant", content=message.get("content") or ""),
            finish_reason=choice.get("finish_reason") or "",
            usage=_usage(answer),
            served=_served(request_id, target),
        )

    async def ChatStream(self, request: pb.ChatRequest, context: Context) -> AsyncIterator[pb.ChatChunk]:
        async with aclosing(self._events(Api.CHAT, _streamed(_chat(request)), request.options, context)) as events:
            async for is_first, request_id, target, event in events:
                choice = _choice(event)
                yield pb.ChatChunk(
                    delta=(choice.get("delta") or {}).get("content") or "",
                    finish_reason=choice.get("finish_reason") or "",
                    usage=_usage(event),
                    served=_served(request_id, target) if is_first else None,
                )

    async def Complete(self, request: pb.CompletionRequest, context: Context) -> pb.CompletionReply:
        request_id, target, answer = await self._whole(Api.COMPLETION, _completion(request), request.options, context)
        choice = _choice(answer)
        return pb.CompletionReply(
            text=choice.get("text") or "",
            finish_reason=choice.get("finish_reason") or "",
            usage=_usage(answer),
            served=_served(request_id, target),
        )

    async def CompleteStream(self, request: pb.CompletionRequest, context: Context) -> AsyncIterator[pb.CompletionChunk]:
        async with aclosing(self._events(Api.COMPLETION, _streamed(_completion(request)), request.options, context)) as events:
            async for is_first, request_id, target, event in events:
                choice = _choice(event)
                yield pb.CompletionChunk(
                    delta=choice.get("text") or "",
                    finish_reason=choice.get("finish_reason") or "",
                    usage=_usage(event),
                    served=_served(request_id, target) if is_first else None,
                )

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsReply:
        return pb.ListModelsReply(models=[pb.ServedModel(id=model.served_name, owned_by="aerostat") for model in self._catalog.models()])

    async def _whole(self, api: Api, document: Event, options: pb.CallOptions, context: Context) -> tuple[str, Target, Event]:
        answers: list[tuple[str, Target, Event]] = []
        async with aclosing(self._events(api, document, options, context)) as events:
            async for _, request_id, target, event in events:  # to the end, since leaving early means to abandon the call
                answers.append((request_id, target, event))
        return answers[-1]

    async def _events(
        self, api: Api, document: Event, options: pb.CallOptions, context: Context
    ) -> AsyncGenerator[tuple[bool, str, Target, Event], None]:
        is_first = True
        try:
            async with aclosing(self._calls.run(api, _headers(options, context), document)) as events:
                async for request_id, target, event in events:
                    yield is_first, request_id, target, event
                    is_first = False
        except RejectedError as rejected:
            await _abort(context, rejected.error)


async def _abort(context: Context, error: ApiError) -> NoReturn:
    trailers: list[tuple[str, str]] = [("aerostat-error-code", error.code)]
    if error.retry_after is not None:
        trailers.append(("retry-after", f"{error.retry_after:g}"))
    if error.dropped is not None:
        trailers.append(("x-aerostat-dropped-reason", error.dropped.value))
    await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message, trailing_metadata=tuple(trailers))
    raise AssertionError("abort does not return")


def _headers(options: pb.CallOptions, context: Context) -> dict[bytes, bytes]:
    """Metadata as the HTTP headers that they are; the options say the same things in their own fields, and win."""
    headers = {k.lower().encode(): v if isinstance(v, bytes) else v.encode() for k, v in context.invocation_metadata() or ()}
    headers.pop(b"accept", None)
    if options.session_id:
        headers[b"x-aerostat-session-id"] = options.session_id.encode()
    if options.session_final:
        headers[b"x-aerostat-session-final"] = b"true"
    if options.HasField("slo_ttft_ms"):
        headers[b"x-aerostat-slo-ttft-ms"] = b"%d" % options.slo_ttft_ms
    return headers


def _chat(request: pb.ChatRequest) -> Event:
    messages = [{"role": m.role, "content": m.content} for m in request.messages]
    return {**_options(request.options), "model": request.model, "messages": messages}


def _completion(request: pb.CompletionRequest) -> Event:
    return {**_options(request.options), "model": request.model, "prompt": request.prompt}


def _options(options: pb.CallOptions) -> Event:
    body: Event = {key: _whole_number(value) for key, value in MessageToDict(options.extra).items()}
    for field in ("max_tokens", "temperature", "top_p", "seed"):
        if options.HasField(field):
            body[field] = getattr(options, field)
    if options.stop:
        body["stop"] = list(options.stop)
    body.pop("stream", None)
    return body


def _whole_number(value: Any) -> Any:
    """A Struct knows floats only; an engine refuses 5.0 where it wants 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _streamed(document: Event) -> Event:
    return {**document, "stream": True, "stream_options": {"include_usage": True}}


def _choice(event: Event) -> Event:
    choices = event.get("choices") or [{}]
    choice: Event = choices[0]
    return choice


def _usage(event: Event) -> pb.Usage | None:
    usage = read_usage(event.get("usage"))
    if usage is None:
        return None
    return pb.Usage(prompt_tokens=usage.n_prompt, completion_tokens=usage.n_output, cached_tokens=usage.n_cached)


def _served(request_id: str, target: Target) -> pb.Served:
    return pb.Served(request_id=request_id, instance=target.instance.name, route=target.route.value)


class GrpcServer:
    """`start` and `drain` it inside one running loop."""

    def __init__(self, servicer: InferenceServicer) -> None:
        options = (
            ("grpc.so_reuseport", 0),  # a busy port is an error, not a second listener
            ("grpc.max_receive_message_length", _MAX_MESSAGE),
            ("grpc.max_send_message_length", _MAX_MESSAGE),
        )
        self._server = grpc.aio.server(options=options)
        self._health = health.aio.HealthServicer()
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((_INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, listen: Address) -> int:
        """Returns the port. Raises SettingError when the address cannot be listened on."""
        try:
            port = self._server.add_insecure_port(str(listen))
        except RuntimeError as refused:
            raise SettingError(f"cannot listen on {listen}: it is busy, or not this machine's. Choose another {listen.flag}.") from refused
        await self._server.start()
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(is_ready=False)
        return int(port)

    async def set_ready(self, *, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", "readiness", _INFERENCE):
            await self._health.set(service, status)

    async def drain(self, grace: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
