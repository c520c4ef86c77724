"""What an engine says when it refuses a call, in the words of our own API: SGLang's error objects differ per endpoint."""

import re
from typing import Any, Final

import orjson

from aerostat_core import api_errors
from aerostat_core.api_errors import ApiError
from aerostat_router.calls import Result
from aerostat_router.http.stream_call import FailureKind

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "invalid_request_error", 429: "rate_limit_error"}
_CONTEXT = re.compile(r"context length|maximum context|longer than the model", re.IGNORECASE)
_TRACE = re.compile(r"File \"[^\"]*\", line \d+")
"""Where in the engine's code a check failed: FastAPI ends its validation errors with it, and it names folders of the server.

No repetition before the word: clients write what stands there, and a search must not begin anew at each of their spaces.
"""
_TIMEOUTS = (FailureKind.HEAD_TIMEOUT, FailureKind.IDLE_TIMEOUT)
_MAX_MESSAGE = 2000


def engine_error(model: str, result: Result) -> ApiError:
    """Of a try that ended before its first byte."""
    failure = result.failure
    if failure is not None:
        if failure.kind in _TIMEOUTS:
            message = f"The engine of {model} did not answer in time: {failure.detail}."
            return ApiError(status=504, type="timeout_error", code="deadline_exceeded", message=message)
        return api_errors.upstream_disconnected(model)
    status = result.status or 502
    message = _message(result.refusal) or f"The engine of {model} answered {status} without a reason."
    if status == 400 and _CONTEXT.search(message):
        return ApiError(status=400, type="invalid_request_error", code="context_length_exceeded", message=message, param="messages")
    if status in (401, 503):  # between the router and the engine: never the client's fault
        return api_errors.no_capacity(model, message, retry_after=1)
    if status < 500:
        status = 400 if status == 422 else status
        return ApiError(status=status, type=_TYPES.get(status, "invalid_request_error"), code="invalid_value", message=message)
    return ApiError(status=status, type="server_error", code="engine_error", message=message)


def _message(body: bytes) -> str:
    """The engine's own words, without where in its code they come from."""
    words = _words(body)
    trace = _TRACE.search(words)
    return (words if trace is None else words[: trace.start()].rstrip())[:_MAX_MESSAGE]


def _words(body: bytes) -> str:
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace").strip()
    if isinstance(found, dict):
        inner = found.get("error", found)
        for holder in (inner, found):
            for key in ("message", "detail"):
                if isinstance(holder, dict) and isinstance(holder.get(key), str):
                    return str(holder[key])
        if isinstance(inner, str):
            return inner
    return ""
