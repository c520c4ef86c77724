"""The one call that an engine's HTTP server makes to itself: that garbage collection shall not look at what start-up made."""

from __future__ import annotations

import logging
import time
from typing import Final

import httpx

from aerostat_core import peers
from aerostat_core.ids import Seconds
from aerostat_runtime.tls import TlsFolder

_POLL: Final[Seconds] = 0.05
_log = logging.getLogger(__name__)


def freeze_gc(
    url: str, admin_key: str, tls: TlsFolder | None = None, *, listens_within: Seconds = 30.0, answers_within: Seconds = 10.0
) -> None:
    """A saving only: an engine that does not get it serves all the same. By TLS the engine is its own client, with its own certificate.

    SGLang's own version has no key and no certificate to show, and asks before the server listens.
    """
    deadline = time.monotonic() + listens_within
    headers, by_name = {"Authorization": f"Bearer {admin_key}"}, {"sni_hostname": peers.ENGINES}
    verified_by = tls.client_context() if tls is not None else False  # there is nothing to verify in plain HTTP
    with httpx.Client(verify=verified_by, timeout=answers_within, trust_env=False) as http:
        while True:
            try:
                http.post(f"{url}/freeze_gc", headers=headers, extensions=by_name).raise_for_status()
            except httpx.ConnectError as error:
                if time.monotonic() < deadline:
                    time.sleep(_POLL)
                    continue
                _log.warning("garbage collection is not frozen, the server cannot be reached: %s", error)
            except httpx.HTTPError as error:
                _log.warning("garbage collection is not frozen: %s", error)
            return
