"""What an engine is sent, and what its usage means. Nothing of a client's headers goes on that is not named here.

The client's credential is replaced by the engine's call key, and its own routing key by the session's hash.
"""

from collections.abc import Mapping
from typing import Any, Final

from aerostat_core.ids import SessionKey
from aerostat_router.calls import Target, Usage
from aerostat_router.http.messages import Header
from aerostat_router.http.stream_call import CallRequest
from aerostat_router.request_body import Api, with_model

_PASSED: Final = (b"accept", b"traceparent", b"tracestate", b"anthropic-version", b"anthropic-beta")
_JSON: Final[Header] = (b"content-type", b"application/json")


def engine_request(
    api: Api, target: Target, session: SessionKey | None, client: Mapping[bytes, bytes], body: bytes, request_id: bytes, *, is_spilled: bool
) -> CallRequest:
    headers = [_JSON, (b"authorization", b"Bearer " + target.call_key.encode()), (b"x-request-id", request_id)]
    if session is not None:
        headers.append((b"x-smg-routing-key", session.encode()))
    for name in _PASSED:
        value = client.get(name)
        if value is not None:
            headers.append((name, value))
    return CallRequest(b"POST", api.value, headers, with_model(body, target.model.served_name) if is_spilled else body)


def reply_headers(request_id: bytes, target: Target | None) -> list[Header]:
    headers: list[Header] = [(b"x-request-id", request_id)]
    if target is not None:
        headers += ((b"x-aerostat-instance", target.instance.name.encode()), (b"x-aerostat-route", target.route.value.encode()))
    return headers


def read_usage(usage: Mapping[str, Any] | None) -> Usage | None:
    """OpenAI's or Anthropic's usage object. Anthropic's input tokens leave out the cached ones; ours never do."""
    if usage is None:
        return None
    if "input_tokens" in usage or "output_tokens" in usage:
        cached = _count(usage.get("cache_read_input_tokens"))
        return Usage(_count(usage.get("input_tokens")) + cached, cached, _count(usage.get("output_tokens")))
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else 0
    return Usage(_count(usage.get("prompt_tokens")), cached, _count(usage.get("completion_tokens")))


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
