"""A session over `/v1/chat/completions`: what a client of the product does, in the smallest complete form.

Knows nothing of terminals. One `ChatSession` is one session id and the messages so far.
"""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import orjson

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Seconds

# A call may be held while its model opens (at most 120 s), and a long prompt takes its time: this bounds silence.
SILENCE_LIMIT: Final[Seconds] = 300.0
CONNECT_LIMIT: Final[Seconds] = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """How a turn was served. `first_token` is seconds from the call to the first text."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token: Seconds
    total: Seconds
    route: str
    instance: str

    def __str__(self) -> str:
        rate = (self.output_tokens - 1) / max(self.total - self.first_token, 1e-6)
        cached = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached"
        speed = f"first token {self.first_token:.2f} s, then {rate:.0f} tokens/s"
        return f"{cached} · route {self.route} · {self.instance} · {speed}"


class ChatSession:
    """`turn` yields text as it comes; afterwards `report` tells how the turn was served."""

    def __init__(self, client: httpx.AsyncClient, *, url: str, model: str, max_tokens: int) -> None:
        self.session_id = f"chat-{uuid.uuid4().hex[:12]}"
        self.report: TurnReport | None = None
        self._client = client
        self._url = url
        self._model = model
        self._max_tokens = max_tokens
        self._messages: list[dict[str, str]] = []

    async def turn(self, text: str) -> AsyncIterator[str]:
        """A failed turn leaves the session as it was. Raises PermanentError or TemporaryError with the router's own message."""
        messages = [*self._messages, {"role": "user", "content": text}]
        body = {"model": self._model, "messages": messages, "max_tokens": self._max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        began = time.monotonic()
        first: Seconds | None = None
        usage: dict[str, Any] = {}
        answer = ""
        timeout = httpx.Timeout(SILENCE_LIMIT, connect=CONNECT_LIMIT)
        headers = {"x-aerostat-session-id": self.session_id}
        try:
            async with self._client.stream(
                "POST", f"{self._url}/v1/chat/completions", json=body, headers=headers, timeout=timeout
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise _error(await response.aread(), response)
                async for event in _events(response):
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        if delta := choice.get("delta", {}).get("content"):
                            first = first or time.monotonic()
                            answer += delta
                            yield delta
        except httpx.HTTPError as error:
            message = f"{self._url} does not answer: {error or type(error).__name__}. Is `aerostat up` running?"
            raise TemporaryError("Unreachable", message, retry_after=1.0) from error
        ended = time.monotonic()
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        self.report = TurnReport(
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            output_tokens=usage.get("completion_tokens", 0),
            first_token=(first or ended) - began,
            total=ended - began,
            route=response.headers.get("x-aerostat-route", "unknown"),
            instance=response.headers.get("x-aerostat-instance", "unknown"),
        )


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Events until `[DONE]`. Raises for an error event and for a stream that ends without a word."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event: dict[str, Any] = orjson.loads(data)
        if "error" in event:
            raise TemporaryError(event["error"].get("code") or "error", event["error"]["message"], retry_after=1.0)
        yield event
    raise TemporaryError("Truncated", "the answer ended before it was complete; send it again", retry_after=1.0)


def _error(body: bytes, response: httpx.Response) -> PermanentError:
    try:
        error = orjson.loads(body)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return PermanentError("HttpError", f"the router answered {response.status_code} {response.reason_phrase}")
    return PermanentError(error.get("code") or "HttpError", error["message"])
