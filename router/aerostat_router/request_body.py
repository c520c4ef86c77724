"""What a request's JSON must be before it may reach an engine, and the few fields that the router needs of it.

Everything else is the engine's to judge: the body goes on as it came.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

import orjson

from aerostat_core.api_errors import ApiError, invalid_value

Document = dict[str, Any]


class RejectedError(Exception):
    """The call cannot be placed at all; `error` is what the client is told."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class Api(Enum):
    """What a call asks for; the value is the engine's path."""

    CHAT = b"/v1/chat/completions"
    COMPLETION = b"/v1/completions"
    EMBEDDING = b"/v1/embeddings"
    MESSAGES = b"/v1/messages"
    COUNT_TOKENS = b"/v1/messages/count_tokens"

    @property
    def is_anthropic(self) -> bool:
        return self in _ANTHROPIC

    @property
    def keeps_kv(self) -> bool:
        """A turn of a session: its KV is worth coming back to."""
        return self in _TURNS


_ANTHROPIC: Final = frozenset((Api.MESSAGES, Api.COUNT_TOKENS))
_TURNS: Final = frozenset((Api.CHAT, Api.COMPLETION, Api.MESSAGES))
_WITH_MESSAGES: Final = frozenset((Api.CHAT, Api.MESSAGES, Api.COUNT_TOKENS))


def read_body(api: Api, body: bytes) -> Document:
    """A document whose `model`, `stream`, token limit and prompt have the right types. Raises RejectedError."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        what = "The body is empty" if not body.strip() else f"The body is not JSON ({error})"
        raise RejectedError(invalid_value(f"{what}. Send a JSON object with `model` and the prompt.")) from error
    if not isinstance(document, dict):
        raise RejectedError(invalid_value(f"The body must be a JSON object, got {_kind(document)}."))
    _check_model(document)
    stream = document.get("stream")
    if stream is not None and stream is not True and stream is not False:
        raise _wrong("stream", "true or false", stream)
    _check_limit(api, document)
    if api in _WITH_MESSAGES:
        _check_messages(document)
    elif api is Api.COMPLETION:
        _check_prompt("prompt", document)
    else:
        _check_prompt("input", document)
    return document


def max_tokens(document: Document) -> int | None:
    limit = document.get("max_completion_tokens")
    return limit if limit is not None else document.get("max_tokens")


def chain_parts(api: Api, document: Document) -> Iterator[bytes]:
    """The call as a chain of messages, canonical bytes each. What names the conversation, and nothing that only tunes sampling."""
    if api is Api.COMPLETION:
        yield _canonical(document["prompt"])
        return
    if api is Api.MESSAGES and document.get("system"):
        yield _canonical(document["system"])
    for message in document["messages"]:
        yield _canonical(message)


def text_bytes(value: object) -> int:
    """Bytes of text in a prompt; images and audio, which are no text, count nothing."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, list):
        return sum(map(text_bytes, value))
    if isinstance(value, dict):
        return sum(text_bytes(value[key]) for key in ("content", "text", "system", "messages", "prompt", "input") if key in value)
    return 0


def with_model(body: bytes, model: str) -> bytes:
    """The same call for another model (a spill)."""
    return orjson.dumps({**orjson.loads(body), "model": model})


def _canonical(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _check_model(document: Document) -> None:
    model = document.get("model")
    if model is None:
        raise RejectedError(invalid_value("`model` is missing. GET /v1/models lists the names.", param="model"))
    if not isinstance(model, str) or not model:
        raise _wrong("model", "the name of a model", model)


def _check_limit(api: Api, document: Document) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        limit = document.get(field)
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise _wrong(field, "a whole number of tokens", limit)
    if api is Api.MESSAGES and document.get("max_tokens") is None:
        raise RejectedError(invalid_value("`max_tokens` is missing. Say how many tokens the answer may have.", param="max_tokens"))


def _check_messages(document: Document) -> None:
    messages = document.get("messages")
    if messages is None:
        raise RejectedError(invalid_value("`messages` is missing. Send at least one message.", param="messages"))
    if not isinstance(messages, list):
        raise _wrong("messages", "a list of messages", messages)
    if not messages:
        raise RejectedError(invalid_value("`messages` is empty. Send at least one message.", param="messages"))
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _wrong(f"messages[{i}]", "an object with role and content", message)
        if not isinstance(message.get("role"), str):
            raise _wrong(f"messages[{i}].role", "a string", message.get("role"))


def _check_prompt(field: str, document: Document) -> None:
    prompt = document.get(field)
    if prompt is None:
        raise RejectedError(invalid_value(f"`{field}` is missing. Send a string.", param=field))
    if not isinstance(prompt, str | list):
        raise _wrong(field, "a string or a list", prompt)
    if not prompt:
        raise RejectedError(invalid_value(f"`{field}` is empty.", param=field))


def _wrong(field: str, expected: str, got: object) -> RejectedError:
    return RejectedError(invalid_value(f"`{field}` must be {expected}, got {_kind(got)}.", param=field))


def _kind(value: object) -> str:
    """A value's JSON type, and the value where it is short: a client's text does not belong into our messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value:.20g}"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"
