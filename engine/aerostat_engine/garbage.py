"""The one call that an engine's HTTP server makes to itself: that garbage collection shall not look at what start-up made."""

from __future__ import annotations

import logging
import time
from typing import Final

import requests

from aerostat_core.ids import Seconds

_POLL: Final[Seconds] = 0.05
_log = logging.getLogger(__name__)


def freeze_gc(url: str, admin_key: str, *, listens_within: Seconds = 30.0, answers_within: Seconds = 10.0) -> None:
    """A saving only: an engine that does not get it serves all the same.

    SGLang's own version has no key to show, and asks before the server listens.
    """
    deadline = time.monotonic() + listens_within
    while True:
        try:
            answer = requests.post(f"{url}/freeze_gc", headers={"Authorization": f"Bearer {admin_key}"}, timeout=answers_within)
            answer.raise_for_status()
        except requests.ConnectionError as error:
            if time.monotonic() < deadline:
                time.sleep(_POLL)
                continue
            _log.warning("garbage collection is not frozen, the server does not listen: %s", error)
        except requests.RequestException as error:
            _log.warning("garbage collection is not frozen: %s", error)
        return
