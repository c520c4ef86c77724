"""An engine's HTTP side for tests of a router: answers as SGLang's endpoints do, and fails where a test tells it to."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from aerostat_testing.ports import free_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass(slots=True)
class ScriptedEngine:
    """`gate`, while clear, holds answers before their first byte; `mid_gate` after the first event of a stream."""

    port: int
    got: list[Got] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # refusals to answer with first, in order
    refusal: dict[str, Any] = field(default_factory=lambda: {"object": "error", "message": "refused by script", "type": "x", "code": 400})
    cached_tokens: int = 0
    words: tuple[str, ...] = ("Hello", " there", ".")
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    mid_gate: asyncio.Event = field(default_factory=asyncio.Event)
    is_healthy: bool = True
    cuts_before_answer: int = 0
    cuts_mid_stream: int = 0
    n_aborted: int = 0
    n_running: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        self.mid_gate.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.n_running += 1
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            self.n_aborted += 1
            raise
        finally:
            self.n_running -= 1

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.got.append(Got(path=request.path, headers={k.lower(): v for k, v in request.headers.items()}, body=body))
        if self.statuses:
            return web.json_response(self.refusal, status=self.statuses.pop(0))
        await self.gate.wait()
        if self.cuts_before_answer:
            self.cuts_before_answer -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        usage = {"prompt_tokens": 20, "completion_tokens": len(self.words), "total_tokens": 23}
        usage_with_details = usage | {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
        if request.path == "/v1/messages":
            return await self._anthropic(request, body)
        if not body.get("stream"):
            return web.json_response(self._whole(request.path, body, usage_with_details))
        return await self._stream(request, self._events(request.path, body, usage_with_details))

    def _whole(self, path: str, body: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        text = "".join(self.words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if path == "/v1/completions":
            return {
                "id": "c",
                "object": "text_completion",
                "created": 1,
                "model": body["model"],
                "choices": [choice | {"text": text}],
                "usage": usage,
            }
        message = {"role": "assistant", "content": text}
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice | {"message": message}],
            "usage": usage,
        }

    def _events(self, path: str, body: dict[str, Any], usage: dict[str, Any]) -> list[str]:
        is_chat = path == "/v1/chat/completions"
        common = {"id": "c", "created": 1, "model": body["model"], "object": "chat.completion.chunk" if is_chat else "text_completion"}
        events = []
        for i, word in enumerate(self.words):
            delta: dict[str, Any] = {"delta": {"role": "assistant", "content": word}} if is_chat else {"text": word}
            reason = "stop" if i == len(self.words) - 1 else None
            events.append(common | {"choices": [delta | {"index": 0, "finish_reason": reason}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(common | {"choices": [], "usage": usage})
        return [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]

    async def _anthropic(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = "".join(self.words)
        usage = {"input_tokens": 20 - self.cached_tokens, "output_tokens": len(self.words), "cache_read_input_tokens": self.cached_tokens}
        message = {"id": "m", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
        if not body.get("stream"):
            content = [{"type": "text", "text": text}]
            return web.json_response(message | {"content": content, "stop_reason": "end_turn", "usage": usage})
        start = {"type": "message_start", "message": message | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}}
        deltas = [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in self.words]
        end = {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage}
        events: list[dict[str, Any]] = [start, {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}]
        events += [*deltas, {"type": "content_block_stop", "index": 0}, end, {"type": "message_stop"}]
        return await self._stream(request, [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events])

    async def _stream(self, request: web.Request, events: list[str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for i, event in enumerate(events):
            await response.write(event.encode())
            if i == 0:
                await self.mid_gate.wait()
                if self.cuts_mid_stream:
                    self.cuts_mid_stream -= 1
                    assert request.transport is not None
                    request.transport.abort()
                    return response
        return response


@asynccontextmanager
async def scripted_engine(tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(free_port())
    app = web.Application(client_max_size=64 << 20)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"):
        app.router.add_post(path, engine.answer)
    app.router.add_get("/health", engine.health)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", engine.port, ssl_context=tls).start()
        yield engine
    finally:
        await runner.cleanup()
