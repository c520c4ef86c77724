"""Which key opens which path of an engine."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from aerostat_engine.auth import CALL_PATHS, KeyGate, Receive, Scope, Send

pytestmark = pytest.mark.cpu


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def ask(path: str, *headers: tuple[bytes, bytes], kind: str = "http", method: str = "POST") -> list[MutableMapping[str, Any]]:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    gate = KeyGate(application, call_key="call", admin_key="admin")
    await gate({"type": kind, "path": path, "method": method, "headers": list(headers)}, receive, send)
    return sent


async def status(path: str, *headers: tuple[bytes, bytes], method: str = "POST") -> int:
    return int((await ask(path, *headers, method=method))[0]["status"])


CALL = (b"authorization", b"Bearer call")
ADMIN = (b"authorization", b"bearer admin")


@pytest.mark.parametrize("path", sorted(CALL_PATHS))
async def test_calls_need_a_key(path: str) -> None:
    assert await status(path) == 401
    assert await status(path, (b"authorization", b"Bearer other")) == 401
    assert await status(path, (b"authorization", b"Basic call")) == 401
    assert await status(path, method="OPTIONS") == 401
    assert await status(path, CALL) == 200
    assert await status(path, (b"x-api-key", b"call")) == 200
    assert await status(path, ADMIN) == 200


@pytest.mark.parametrize(
    "path", ["/abort_request", "/flush_cache", "/server_info", "/health_generate", "/health/", "/docs", "/not/there", ""]
)
async def test_everything_else_needs_the_admin_key(path: str) -> None:
    assert await status(path) == 401
    assert await status(path, CALL) == 401
    assert await status(path, ADMIN) == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_liveness_and_metrics_are_open(path: str) -> None:
    assert await status(path) == 200


async def test_an_authorization_header_is_not_second_guessed_by_another_header() -> None:
    assert await status("/generate", (b"x-api-key", b"call"), (b"authorization", b"Bearer wrong")) == 401


async def test_web_sockets_are_closed() -> None:
    assert (await ask("/v1/realtime", ADMIN, kind="websocket"))[0]["type"] == "websocket.close"


async def test_a_refusal_is_an_error_object_that_names_the_remedy() -> None:
    start, body = await ask("/generate")
    assert (b"www-authenticate", b"Bearer") in start["headers"]
    error = json.loads(body["body"])["error"]
    assert error["code"] == "invalid_api_key"
    assert "through a router" in error["message"]
