"""Who may call what of an engine: an ASGI gate in front of SGLang's application.

Ours, rather than SGLang's `--api-key` and `--admin-api-key`, for three reasons: SGLang prints its arguments into the log and answers them
on `/server_info`, keys included; it lets anyone run `/health_generate` and open web sockets; what it does not list needs the weaker key.
Here the call key opens the calls below and nothing else, every other path needs the admin key, and only liveness and metrics are open.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/metrics", "/metrics/"})
"""Liveness and metrics: they tell load and the model's name, and neither prompts nor sessions."""
CALL_PATHS = frozenset(
    {
        "/generate",
        "/tokenize",
        "/detokenize",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/responses",
        "/v1/tokenize",
        "/v1/detokenize",
    }
)


class KeyGate:
    """Answers 401 to what does not carry the key that its path needs, as `Authorization: Bearer` or `x-api-key`."""

    def __init__(self, app: AsgiApp, *, call_key: str, admin_key: str) -> None:
        self._app = app
        self._call_key = call_key.encode()
        self._admin_key = admin_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._admits(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": "not offered"})

    def _admits(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN_PATHS:
            return True
        key = _presented(scope)
        if path in CALL_PATHS and hmac.compare_digest(key, self._call_key):
            return True
        return hmac.compare_digest(key, self._admin_key)


def _presented(scope: Scope) -> bytes:
    key = b""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:])
        if name == b"x-api-key":
            key = bytes(value)
    return key


async def _refuse(send: Send) -> None:
    body = {
        "error": {
            "message": "This engine answers only to the key that its agent gives to routers: call the model through a router.",
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
