"""Calls of a client, with all that tests look at: text, usage, the answer's headers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx
import orjson

from aerostat_core.ids import Seconds

CALL_LIMIT: Final[Seconds] = 150.0
Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    prompt_tokens: int
    cached_tokens: int
    route: str
    instance: str

    @classmethod
    def of(cls, response: httpx.Response) -> Self:
        assert response.status_code == httpx.codes.OK, response.text
        body = response.json()
        return cls(
            text=body["choices"][0]["message"]["content"],
            prompt_tokens=body["usage"]["prompt_tokens"],
            cached_tokens=(body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            route=response.headers["x-aerostat-route"],
            instance=response.headers["x-aerostat-instance"],
        )


def post(url: str, body: dict[str, Any], *, session: str | None = None, path: str = "/v1/chat/completions") -> httpx.Response:
    headers = {} if session is None else {"x-aerostat-session-id": session}
    return httpx.post(url + path, json=body, headers=headers, timeout=CALL_LIMIT)


def chat(url: str, model: str, messages: Sequence[Message], *, session: str | None = None, n_tokens: int = 12, **fields: Any) -> Answer:
    """One greedy turn. `fields` go into the body as they are."""
    body = {"model": model, "messages": list(messages), "max_tokens": n_tokens, "temperature": 0} | fields
    return Answer.of(post(url, body, session=session))


def stream(url: str, model: str, text: str, *, n_tokens: int, session: str | None = None) -> Iterator[dict[str, Any]]:
    """Events of one streamed answer of exactly so many tokens; the last one is `{"done": True}` where the stream said so."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": n_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {} if session is None else {"x-aerostat-session-id": session}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=CALL_LIMIT) as response:
        assert response.status_code == httpx.codes.OK, response.read()
        for line in response.iter_lines():
            if line.startswith("data:"):
                data = line.removeprefix("data:").strip()
                yield {"done": True} if data == "[DONE]" else orjson.loads(data)


def text_of(events: Sequence[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ()))
