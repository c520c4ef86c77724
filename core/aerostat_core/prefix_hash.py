"""Hashes that name prefixes and sessions. All parts that compare them call these functions.

* A token-prefix hash is cumulative over full pages, so that equal hashes mean equal prefixes and a longer
  prefix extends a shorter one. The engine makes it; routers and agents compare it and never look inside.
* A message chain is the same over the messages of a call, for parties that do not tokenise.
* A session key is how a session is known outside the router: it carries neither tenant nor id in clear.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence

from aerostat_core.ids import SessionKey

DIGEST_BYTES = 16


def _digest(*parts: bytes) -> bytes:
    h = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        h.update(struct.pack("<Q", len(part)))
        h.update(part)
    return h.digest()


def token_pages(tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """Cumulative hash after each full page of `page_size` tokens; the tail of a partial page has none."""
    if page_size < 1:
        raise ValueError(f"page_size must be >= 1 token, got {page_size}")
    state = _digest(b"tokens", struct.pack("<I", page_size))
    for start in range(0, len(tokens) - page_size + 1, page_size):
        state = _digest(state, struct.pack(f"<{page_size}I", *tokens[start : start + page_size]))
        yield state


def token_prefix(tokens: Sequence[int], page_size: int) -> tuple[bytes, int]:
    """Hash at the last full page, and the tokens that it covers (0 and an empty hash for less than a page)."""
    last = b""
    for digest in token_pages(tokens, page_size):
        last = digest
    return last, len(tokens) // page_size * page_size


def message_chain(*, model: str, tenant: str, messages: Iterable[bytes]) -> tuple[bytes, ...]:
    """Cumulative hash after each message (canonical bytes each) of a call."""
    state = _digest(b"messages", model.encode(), tenant.encode())
    chain = []
    for message in messages:
        state = _digest(state, message)
        chain.append(state)
    return tuple(chain)


def session_key(*, tenant: str, session_id: str) -> SessionKey:
    """The key of a session that the client named."""
    return SessionKey(_digest(b"session", tenant.encode(), session_id.encode()).hex())


def inferred_session_key(chain_hash: bytes) -> SessionKey:
    """The key of a session that nobody named: the chain hash of its first whole call."""
    return SessionKey(_digest(b"inferred", chain_hash).hex())
