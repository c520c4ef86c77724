"""How long sessions take, first call to last, as far as this router saw them: a session that clients end says so on its last call.

Bounded: sessions that nobody ends are forgotten, the one that began first before the others.
"""

from typing import Final

from aerostat_core.ids import Seconds, SessionKey

MAX_SESSIONS: Final = 65_536


class SessionSpans:
    """Mutable."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._began: dict[SessionKey, Seconds] = {}  # in the order in which they began

    def __len__(self) -> int:
        return len(self._began)

    def note(self, session: SessionKey, now: Seconds) -> None:
        """A call of it came."""
        if session not in self._began:
            self._began[session] = now
            if len(self._began) > self._limit:
                del self._began[next(iter(self._began))]

    def end(self, session: SessionKey, now: Seconds) -> Seconds | None:
        """Its last call is complete. None: its beginning is not known any more."""
        began = self._began.pop(session, None)
        return None if began is None else now - began
