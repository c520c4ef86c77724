"""Whose turn a call is: the session id that the client gave, or the session that its messages continue.

A session is known outside the router by its key only, a hash of tenant and id. Without an id, a call continues session K when
K is the key of one of its own message prefixes and K is known (from telemetry or from this router's own calls), longest prefix
first. So routers agree without shared state: what they compare is computed from the call itself.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from aerostat_core.ids import SessionKey
from aerostat_core.prefix_hash import inferred_session_key, session_key

MAX_SESSION_ID_BYTES: Final = 256
DEFAULT_TENANT: Final = "default"

ID_HEADERS: Final = (
    b"x-aerostat-session-id",
    b"x-session-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
    b"x-session-affinity",
    b"x-dynamo-session-id",
    b"x-smg-routing-key",
)
FINAL_HEADERS: Final = (b"x-aerostat-session-final", b"x-dynamo-session-final")


class SessionIdError(ValueError):
    """The id cannot be used; `where` names the header or field."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


def tenant_of(headers: Mapping[bytes, bytes]) -> str:
    """A hash of the client's credential, so that sessions never cross between credentials; never the credential itself."""
    credential = headers.get(b"authorization") or headers.get(b"x-api-key")
    if not credential:
        return DEFAULT_TENANT
    if credential[:7].lower() == b"bearer ":
        credential = credential[7:].strip()  # the same key as bearer token and as x-api-key is the same tenant
    return hashlib.blake2b(credential, digest_size=16).hexdigest()


def given_session_id(headers: Mapping[bytes, bytes], body: Mapping[str, Any]) -> str | None:
    """First match wins, headers before fields. Raises SessionIdError for an id of the wrong type or size."""
    for name in ID_HEADERS:
        value = headers.get(name)
        if value:
            return _checked(value.decode("latin-1"), name.decode())
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    for where, given in (
        ("session_id", body.get("session_id")),
        ("metadata.user_id", user),
        ("prompt_cache_key", body.get("prompt_cache_key")),
        ("previous_response_id", body.get("previous_response_id")),
    ):
        if given is not None and given != "":
            return _checked(given, where)
    return None


def _checked(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise SessionIdError(where, f"{where} must be a string, got {type(value).__name__}.")
    if len(value.encode("utf-8", "surrogatepass")) > MAX_SESSION_ID_BYTES:
        raise SessionIdError(where, f"{where} takes at most {MAX_SESSION_ID_BYTES} bytes. Send a shorter session id, or a hash of it.")
    return value


def is_final(headers: Mapping[bytes, bytes]) -> bool:
    return any(headers.get(name, b"").strip().lower() in (b"true", b"1") for name in FINAL_HEADERS)


def named_session(tenant: str, session_id: str) -> SessionKey:
    return session_key(tenant=tenant, session_id=session_id)


def continued_session(chain: Sequence[bytes], is_known: Callable[[SessionKey], bool]) -> SessionKey:
    """The known session with the longest prefix of the call, else the new one that this call begins. `chain` is not empty.

    The whole call counts as a prefix of itself: a client that sends its call again continues, rather than begins, its session.
    """
    for chain_hash in reversed(chain):
        key = inferred_session_key(chain_hash)
        if is_known(key):
            return key
    return inferred_session_key(chain[-1])


class OwnSessions:
    """Keys that this router inferred, most recently used last. Bounded per tenant and in tenants; telemetry has the rest."""

    def __init__(self, *, max_per_tenant: int = 4096, max_tenants: int = 256) -> None:
        self._max_per_tenant = max_per_tenant
        self._max_tenants = max_tenants
        self._tenants: OrderedDict[str, OrderedDict[SessionKey, None]] = OrderedDict()

    def knows(self, tenant: str, key: SessionKey) -> bool:
        keys = self._tenants.get(tenant)
        return keys is not None and key in keys

    def remember(self, tenant: str, key: SessionKey) -> None:
        keys = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        keys[key] = None
        keys.move_to_end(key)
        if len(keys) > self._max_per_tenant:
            keys.popitem(last=False)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)

    def forget(self, tenant: str, key: SessionKey) -> None:
        keys = self._tenants.get(tenant)
        if keys is not None:
            keys.pop(key, None)

    def check_integrity(self) -> None:
        if len(self._tenants) > self._max_tenants:
            raise AssertionError(f"{len(self._tenants)} tenants, at most {self._max_tenants}")
        if any(len(keys) > self._max_per_tenant for keys in self._tenants.values()):
            raise AssertionError(f"a tenant has more than {self._max_per_tenant} sessions")
