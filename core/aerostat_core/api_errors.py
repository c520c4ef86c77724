"""What a client of the inference API is told when a call fails: OpenAI error objects, as values.

The HTTP and gRPC fronts render them; nothing here knows either protocol's library. Messages name the remedy.
"""

from dataclasses import dataclass
from enum import StrEnum

from aerostat_core.ids import Seconds


class DropReason(StrEnum):
    """Value of `x-aerostat-dropped-reason` (the words of llm-d, so that its dashboards fit)."""

    SATURATED = "rejected-saturated"
    NO_ENDPOINTS = "rejected-no-endpoints"
    TTL_EXPIRED = "rejected-ttl-expired"
    CONTEXT_CANCELLED = "rejected-context-cancelled"
    SHUTTING_DOWN = "rejected-shutting-down"
    QUEUE_PRESSURE = "evicted-queue-pressure"
    PRIORITY = "evicted-priority"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError:
    """One failed call. `code` is the machine-readable word, `status` the HTTP one (gRPC maps from both)."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after: Seconds | None = None
    dropped: DropReason | None = None

    def body(self) -> dict[str, object]:
        """The OpenAI error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid_value(message: str, *, param: str | None = None) -> ApiError:
    return ApiError(status=400, type="invalid_request_error", code="invalid_value", message=message, param=param)


def context_length_exceeded(*, model: str, n_tokens: int, limit: int) -> ApiError:
    message = f"{model} takes at most {limit} tokens; this call has about {n_tokens}. Shorten the messages or max_tokens."
    return ApiError(status=400, type="invalid_request_error", code="context_length_exceeded", message=message, param="messages")


def model_not_found(model: str, known: tuple[str, ...]) -> ApiError:
    """Only for a name that no Model object declares; a model that merely does not run is `model_waking`."""
    listed = ", ".join(known) or "none is declared yet"
    message = f"No Model object declares {model!r}. Declared: {listed}."
    return ApiError(status=404, type="invalid_request_error", code="model_not_found", message=message, param="model")


def route_not_found(path: str) -> ApiError:
    message = f"{path} is not served here. See /v1/models, /v1/chat/completions, /v1/completions and /v1/messages."
    return ApiError(status=404, type="invalid_request_error", code="not_found", message=message)


def method_not_allowed(method: str, path: str) -> ApiError:
    message = f"{method} is not possible at {path}."
    return ApiError(status=405, type="invalid_request_error", code="method_not_allowed", message=message)


def body_too_large(limit_bytes: int) -> ApiError:
    message = f"The body is larger than {limit_bytes} bytes, the router's limit (--max-body-bytes)."
    return ApiError(status=413, type="invalid_request_error", code="body_too_large", message=message)


def saturated(model: str, *, retry_after: Seconds) -> ApiError:
    message = f"{model} has more calls than its SLO's hold budget lets wait. Retry later, or raise maxReplicas."
    return ApiError(
        status=429, type="rate_limit_error", code="saturated", message=message, retry_after=retry_after, dropped=DropReason.SATURATED
    )


def model_waking(model: str, *, retry_after: Seconds) -> ApiError:
    message = f"{model} is being opened, which takes longer than this call may be held (the SLO's holdBudget). Retry later."
    return ApiError(
        status=503, type="unavailable_error", code="model_waking", message=message, retry_after=retry_after, dropped=DropReason.TTL_EXPIRED
    )


def no_capacity(model: str, why: str, *, retry_after: Seconds) -> ApiError:
    """`why` is the placement's or engine's own message, as `kubectl describe model` shows it."""
    message = f"No instance can serve {model} now: {why}"
    return ApiError(
        status=503, type="unavailable_error", code="no_capacity", message=message, retry_after=retry_after, dropped=DropReason.NO_ENDPOINTS
    )


def shutting_down(*, retry_after: Seconds) -> ApiError:
    message = "This router is shutting down. Retry: another replica takes the call."
    return ApiError(
        status=503,
        type="unavailable_error",
        code="shutting_down",
        message=message,
        retry_after=retry_after,
        dropped=DropReason.SHUTTING_DOWN,
    )


def deadline_exceeded(what: str, limit: Seconds) -> ApiError:
    return ApiError(status=504, type="timeout_error", code="deadline_exceeded", message=f"{what} took longer than {limit:g} s.")


def upstream_disconnected(model: str) -> ApiError:
    message = f"The engine of {model} was lost. What was streamed so far is all there is; send the call again."
    return ApiError(status=502, type="server_error", code="upstream_disconnected", message=message)
