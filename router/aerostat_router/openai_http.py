"""The HTTP API: OpenAI's paths, and Anthropic's messages. Reads a request, hands a call to dispatch, renders what comes back.

The answer's bytes never pass through here: `http.exchange` forwards them.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final
from urllib.parse import unquote_to_bytes

import orjson

from aerostat_core import api_errors
from aerostat_core.api_errors import ApiError
from aerostat_core.specs import Model
from aerostat_router.calls import Call, Result, Target
from aerostat_router.catalog import Catalog
from aerostat_router.dispatch import Dispatcher
from aerostat_router.engine_request import engine_request, read_usage, reply_headers
from aerostat_router.http.errors import ANTHROPIC
from aerostat_router.http.exchange import Exchange, Forwarded
from aerostat_router.http.messages import Header, Request
from aerostat_router.http.stream_call import Failure
from aerostat_router.intake import Intake
from aerostat_router.request_body import Api, RejectedError, read_body

_MODELS: Final = b"/v1/models"
_CALLS: Final[Mapping[bytes, Api]] = {api.value: api for api in Api}
_JSON: Final[Header] = (b"content-type", b"application/json")
_SAFE_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class ApiHandler:
    """`http.exchange.Handler`."""

    def __init__(self, *, router: str, catalog: Catalog, dispatcher: Dispatcher, intake: Intake) -> None:
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._intake = intake
        self._id_prefix = f"req-{router}-".encode()
        self._n_requests = 0

    def handle(self, exchange: Exchange) -> None:
        request = exchange.request
        api = _CALLS.get(request.path)
        if api is not None:
            if api.is_anthropic:
                exchange.error_shape = ANTHROPIC
            if request.method == b"POST":
                self._call(api, exchange)
                return
        self._look_up(exchange, is_call=api is not None)

    def _call(self, api: Api, exchange: Exchange) -> None:
        request = exchange.request
        carrier = HttpCarrier(api, exchange, self._dispatcher, self._request_id(request))
        try:
            document = read_body(api, request.body)
            call = self._intake.admit(api, request.headers, document, len(request.body), carrier, exchange.received_at)
        except RejectedError as rejected:
            self._dispatcher.metrics.rejected(rejected.error.code)
            exchange.reply_error(rejected.error, reply_headers(carrier.request_id, None))
            return
        carrier.call = call
        exchange.on_disconnect = carrier.leave
        self._dispatcher.submit(call)

    def _look_up(self, exchange: Exchange, *, is_call: bool) -> None:
        """Everything but calls: the models, and what is not there."""
        request = exchange.request
        headers = reply_headers(self._request_id(request), None)
        path = request.path.decode("latin-1")
        is_models = request.path == _MODELS or request.path.startswith(_MODELS + b"/")
        if not is_call and not is_models:
            exchange.reply_error(api_errors.route_not_found(path), headers)
        elif is_call or request.method not in (b"GET", b"HEAD"):
            allow: Header = (b"allow", b"POST" if is_call else b"GET, HEAD")
            exchange.reply_error(api_errors.method_not_allowed(request.method.decode("latin-1"), path), (*headers, allow))
        elif request.path == _MODELS:
            exchange.reply(200, (_JSON, *headers), self._list(request))
        else:
            name = unquote_to_bytes(request.path[len(_MODELS) + 1 :]).decode("utf-8", "replace")
            model = self._catalog.model(name)
            if model is None:
                exchange.reply_error(api_errors.model_not_found(name, self._catalog.served_names()), headers)
            else:
                exchange.reply(200, (_JSON, *headers), orjson.dumps(_describe(model, is_anthropic=_is_anthropic(request))))

    def _list(self, request: Request) -> bytes:
        is_anthropic = _is_anthropic(request)
        data = [_describe(model, is_anthropic=is_anthropic) for model in self._catalog.models()]
        if not is_anthropic:
            return orjson.dumps({"object": "list", "data": data})
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return orjson.dumps({"data": data, "has_more": False, **ends})

    def _request_id(self, request: Request) -> bytes:
        """The client's own, where it can be a header again; else one of ours."""
        given = request.headers.get(b"x-request-id")
        if given is not None and _SAFE_ID.fullmatch(given):
            return given
        self._n_requests += 1
        return self._id_prefix + b"%d" % self._n_requests


class HttpCarrier:
    """`calls.Carrier` and `http.exchange.Watcher` of one call."""

    __slots__ = ("_api", "_dispatcher", "_exchange", "call", "request_id")

    def __init__(self, api: Api, exchange: Exchange, dispatcher: Dispatcher, request_id: bytes) -> None:
        self._api = api
        self._exchange = exchange
        self._dispatcher = dispatcher
        self.request_id = request_id
        self.call: Call  # set before it is submitted

    # From dispatch.

    def forward(self, target: Target) -> None:
        call, client = self.call, self._exchange.request
        request = engine_request(
            self._api,
            target,
            call.session,
            client.headers,
            client.body,
            self.request_id,
            is_spilled=target.model is not call.model,
        )
        self._exchange.forward(target.endpoint, request, self, reply_headers=reply_headers(self.request_id, target))

    def refuse(self, error: ApiError) -> None:
        self._exchange.reply_error(error, reply_headers(self.request_id, None))

    # From the exchange.

    def leave(self) -> None:
        self._dispatcher.abandon(self.call)

    def on_first_byte(self, exchange: Exchange) -> None:
        self._dispatcher.first_byte(self.call)

    def on_end(self, exchange: Exchange, forwarded: Forwarded) -> None:
        usage = read_usage(forwarded.tail.usage())
        self._dispatcher.end(self.call, Result(forwarded.outcome, forwarded.status, forwarded.failure, forwarded.refusal, usage))

    def explain(self, failure: Failure) -> ApiError:
        return api_errors.upstream_disconnected(self.call.model.served_name)


def _is_anthropic(request: Request) -> bool:
    return b"anthropic-version" in request.headers


def _describe(model: Model, *, is_anthropic: bool) -> dict[str, object]:
    if is_anthropic:
        return {"type": "model", "id": model.served_name, "display_name": model.served_name, "created_at": model.created_at or _EPOCH}
    return {"id": model.served_name, "object": "model", "created": _unix(model.created_at), "owned_by": "aerostat"}


_EPOCH: Final = "1970-01-01T00:00:00Z"


def _unix(created_at: str) -> int:
    return int(datetime.fromisoformat(created_at or _EPOCH).timestamp())
