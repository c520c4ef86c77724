"""Errors as bytes: the two shapes that clients parse (OpenAI, Anthropic), and the errors that only an HTTP front can meet.

The errors of a call, as values, are `aerostat_core.api_errors`.
"""

import math
from typing import ClassVar, Protocol

import orjson

from aerostat_core.api_errors import ApiError
from aerostat_core.ids import Seconds
from aerostat_router.http.messages import Header


class ErrorShape(Protocol):
    """How one API family writes an error."""

    def body(self, error: ApiError) -> bytes: ...

    def event(self, error: ApiError) -> bytes:
        """A whole server-sent event: the last one of a stream that broke."""
        ...


class OpenAIShape:
    def body(self, error: ApiError) -> bytes:
        return orjson.dumps(error.body())

    def event(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % self.body(error)


class AnthropicShape:
    """Anthropic's error types follow the status; `code` and `param` have no place there, the message says it all."""

    _TYPES: ClassVar = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }

    def body(self, error: ApiError) -> bytes:
        kind = self._TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})

    def event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.body(error)


OPENAI: ErrorShape = OpenAIShape()
ANTHROPIC: ErrorShape = AnthropicShape()


def error_headers(error: ApiError) -> list[Header]:
    """`Retry-After` where another try may help, and why a call was dropped under both names that dashboards read."""
    headers: list[Header] = []
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if error.dropped is not None:
        reason = error.dropped.value.encode()
        headers += [(b"x-aerostat-dropped-reason", reason), (b"x-llm-d-request-dropped-reason", reason)]
    return headers


def malformed(detail: str) -> ApiError:
    message = f"The request is not valid HTTP/1.1: {detail}. Check the client, or what stands between it and the router."
    return ApiError(status=400, type="invalid_request_error", code="bad_request", message=message)


def head_too_large(what: str, limit: int) -> ApiError:
    message = f"The request's head has more than {limit} {what}. Send fewer or shorter headers."
    return ApiError(status=431, type="invalid_request_error", code="headers_too_large", message=message)


def unsupported_version(version: str) -> ApiError:
    message = f"HTTP/{version} is not served here. Use HTTP/1.1."
    return ApiError(status=505, type="invalid_request_error", code="http_version_not_supported", message=message)


def unsupported_coding(coding: str) -> ApiError:
    message = f"Transfer-Encoding {coding!r} is not understood. Use `chunked` or a Content-Length."
    return ApiError(status=501, type="invalid_request_error", code="transfer_encoding_not_supported", message=message)


def unsupported_expectation(value: str) -> ApiError:
    message = f"Expect {value!r} cannot be met. Only `100-continue` is."
    return ApiError(status=417, type="invalid_request_error", code="expectation_failed", message=message)


def slow_request(what: str, limit: Seconds) -> ApiError:
    message = f"The request's {what} did not arrive within {limit:g} s. Send it faster."
    return ApiError(status=408, type="invalid_request_error", code="request_timeout", message=message)


def too_many_connections(limit: int) -> ApiError:
    message = f"This router already has {limit} connections. Reuse connections, add a router replica, or raise its connection limit."
    return ApiError(status=503, type="unavailable_error", code="too_many_connections", message=message, retry_after=1)


def internal_error() -> ApiError:
    message = "The router failed on this request; its log has the reason. Report it with the request id."
    return ApiError(status=500, type="server_error", code="internal_error", message=message)
