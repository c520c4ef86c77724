"""From a request, by whatever protocol, to a `Call`: whose it is, which model it names, how large it is, how long it may wait."""

import logging
from collections.abc import Mapping
from typing import Final

from aerostat_core import api_errors
from aerostat_core.ids import Seconds, SessionKey
from aerostat_core.prefix_hash import message_chain
from aerostat_core.specs import Model
from aerostat_router.calls import Call, Carrier
from aerostat_router.catalog import Catalog
from aerostat_router.dispatch import Dispatcher
from aerostat_router.policy.estimates import MAX_BYTES_PER_TOKEN
from aerostat_router.policy.sessions import (
    OwnSessions,
    SessionIdError,
    continued_session,
    given_session_id,
    is_final,
    named_session,
    tenant_of,
)
from aerostat_router.request_body import Api, Document, RejectedError, chain_parts, max_tokens, text_bytes

logger = logging.getLogger(__name__)

_TTFT_HINTS: Final = (b"x-aerostat-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")


class Intake:
    """`own` are the sessions that this router inferred itself; telemetry has those of the others."""

    def __init__(self, catalog: Catalog, dispatcher: Dispatcher) -> None:
        self._catalog = catalog
        self._dispatcher = dispatcher
        self.own = OwnSessions()

    def admit(
        self, api: Api, headers: Mapping[bytes, bytes], document: Document, n_body_bytes: int, carrier: Carrier, received_at: Seconds
    ) -> Call:
        """A call that may be submitted. Raises RejectedError."""
        model = self._model(document["model"])
        limit = max_tokens(document)
        self._check_length(model, document, n_body_bytes, limit)
        tenant = tenant_of(headers)
        session, wants_lease = self._session(api, model, tenant, headers, document)
        estimates = self._dispatcher.estimates
        slo = self._catalog.slo(model)
        return Call(
            carrier=carrier,
            model=model,
            session=session,
            tenant=tenant,
            n_body_bytes=n_body_bytes,
            n_prompt_tokens=estimates.n_prompt(model.name, n_body_bytes),
            n_output_tokens=estimates.n_output(model.name, limit),
            received_at=received_at,
            hold_until=received_at + slo.hold_budget,
            ttft=_ttft_hint(headers) or slo.ttft,
            is_final=is_final(headers),
            wants_lease=wants_lease,
        )

    def _model(self, name: str) -> Model:
        model = self._catalog.model(name)
        if model is not None:
            return model
        if not self._catalog.is_synced:
            raise RejectedError(api_errors.no_capacity(name, "this router is still reading what is declared", retry_after=1))
        raise RejectedError(api_errors.model_not_found(name, self._catalog.served_names()))

    def _check_length(self, model: Model, document: Document, n_body_bytes: int, limit: int | None) -> None:
        """Only what is surely too long: the engine, which has the tokenizer, counts the rest."""
        context = model.context_tokens or max(
            (c.engine.max_context_tokens for c in self._dispatcher.fleet.candidates(model.name)), default=0
        )
        if not context:
            return
        n_tokens = n_body_bytes // MAX_BYTES_PER_TOKEN
        if n_tokens > context:
            n_tokens = text_bytes(document) // MAX_BYTES_PER_TOKEN
        if n_tokens + (limit or 0) > context:
            raise RejectedError(
                api_errors.context_length_exceeded(model=model.served_name, n_tokens=n_tokens + (limit or 0), limit=context)
            )

    def _session(
        self, api: Api, model: Model, tenant: str, headers: Mapping[bytes, bytes], document: Document
    ) -> tuple[SessionKey | None, bool]:
        """The session's key, and whether its next call can be recognised (so that a lease for it makes sense)."""
        if not api.keeps_kv:
            return None, False
        try:
            given = given_session_id(headers, document)
        except SessionIdError as error:
            raise RejectedError(api_errors.invalid_value(str(error), param=error.where)) from error
        if given is not None:
            return named_session(tenant, given), True
        chain = message_chain(model=str(model.name), tenant=tenant, messages=chain_parts(api, document))
        own, fleet = self.own, self._dispatcher.fleet
        key = continued_session(chain, lambda k: own.knows(tenant, k) or fleet.knows(k))
        own.remember(tenant, key)
        return key, api is not Api.COMPLETION


def _ttft_hint(headers: Mapping[bytes, bytes]) -> Seconds | None:
    """A hint never changes correctness: one that cannot be read is as good as none."""
    for name in _TTFT_HINTS:
        value = headers.get(name)
        if value is not None:
            try:
                hint = float(value) / 1000
            except ValueError:
                hint = 0.0
            if 0 < hint < float("inf"):
                return hint
            logger.debug("%s is not a positive number of milliseconds: ignored", name.decode())
    return None
