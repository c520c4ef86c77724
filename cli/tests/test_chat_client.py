"""A session's turns against a router that is spoken for by a transport."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from aerostat_cli.chat_client import ChatSession
from aerostat_core.errors import PermanentError, TemporaryError

pytestmark = pytest.mark.cpu

Handler = Callable[[httpx.Request], httpx.Response]


def session(handler: Handler) -> ChatSession:
    client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
    return ChatSession(client, url="http://router", model="m", max_tokens=8)


def stream(*events: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + (["data: [DONE]\n\n"] if done else [])
    return "".join(lines).encode()


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 96}}}


async def test_text_comes_as_it_is_streamed_and_the_report_tells_how_it_was_served() -> None:
    headers = {"x-aerostat-route": "lease", "x-aerostat-instance": "cpu-a-0"}
    chat = session(lambda _: httpx.Response(200, headers=headers, content=stream(delta("Hel"), delta("lo"), USAGE)))
    assert [text async for text in chat.turn("hi")] == ["Hel", "lo"]
    assert chat.report is not None
    assert (chat.report.cached_tokens, chat.report.prompt_tokens) == (96, 100)
    assert "96 of 100 prompt tokens cached · route lease · cpu-a-0" in str(chat.report)


async def test_the_next_turn_carries_the_session_and_all_that_was_said() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=stream(delta("Hello"), USAGE))

    chat = session(answer)
    for text in ("hi", "again"):
        assert [t async for t in chat.turn(text)] == ["Hello"]
    roles = [(m["role"], m["content"]) for m in json.loads(seen[1].content)["messages"]]
    assert roles == [("user", "hi"), ("assistant", "Hello"), ("user", "again")]
    assert {r.headers["x-aerostat-session-id"] for r in seen} == {chat.session_id}


async def test_an_error_of_the_router_is_told_in_its_own_words_and_leaves_the_session_as_it_was() -> None:
    answers = [
        httpx.Response(404, json={"error": {"message": "No Model object declares 'm'.", "code": "model_not_found"}}),
        httpx.Response(200, content=stream(delta("Hello"), USAGE)),
    ]
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.content)
        return answers.pop(0)

    chat = session(answer)
    with pytest.raises(PermanentError, match="No Model object declares"):
        assert [t async for t in chat.turn("hi")]
    assert [t async for t in chat.turn("hi")] == ["Hello"]
    assert seen[0] == seen[1]


async def test_an_error_event_in_mid_stream_is_an_error() -> None:
    lost = {"error": {"message": "The engine of m was lost.", "code": "upstream_disconnected"}}
    chat = session(lambda _: httpx.Response(200, content=stream(delta("Hel"), lost, done=False)))
    with pytest.raises(TemporaryError, match="was lost"):
        assert [t async for t in chat.turn("hi")]


async def test_a_stream_that_ends_without_a_word_is_an_error() -> None:
    chat = session(lambda _: httpx.Response(200, content=stream(delta("Hel"), done=False)))
    with pytest.raises(TemporaryError, match="before it was complete"):
        assert [t async for t in chat.turn("hi")]


async def test_a_router_that_is_not_there_is_an_error_that_says_what_to_start() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(TemporaryError, match="Is `aerostat up` running"):
        assert [t async for t in session(refuse).turn("hi")]
