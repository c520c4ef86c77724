"""Clients that keep calling while a test breaks something: what each of them saw, and how long nobody was served."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

from aerostat_core.ids import Seconds
from aerostat_testing.calls import CALL_LIMIT, stream
from aerostat_testing.waiting import wait_for

ANSWERED: Final = "answered"
_BETWEEN: Final[Seconds] = 0.2
_STOP_LIMIT: Final[Seconds] = 90.0
_PATIENCE: Final[Seconds] = 60.0  # of one call, before its client gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`outcome`: answered, or the status and code of the refusal, or what broke."""

    began: Seconds
    ended: Seconds
    outcome: str


class Load:
    """Context manager: so many clients, one short call after the other, each over a connection of its own."""

    def __init__(self, url: str, *models: str, n_tokens: int = 4) -> None:
        self._url, self._models, self._n_tokens = url, models, n_tokens
        self._stop = threading.Event()
        self._calls: list[Call] = []
        self._threads = [threading.Thread(target=self._run, args=(model,)) for model in models]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_STOP_LIMIT)
            assert not thread.is_alive(), "a call neither ended nor failed"

    @property
    def calls(self) -> list[Call]:
        """Those that have ended, in that order."""
        return list(self._calls)

    def outcomes(self, *, since: Seconds = 0.0) -> Counter[str]:
        """Of calls that ended after that moment."""
        return Counter(call.outcome for call in self.calls if call.ended >= since)

    def away(self, since: Seconds) -> Seconds:
        """From that moment until the last call ended that was not answered; 0 where all were."""
        return max((call.ended - since for call in self.calls if call.ended >= since and call.outcome != ANSWERED), default=0.0)

    def slowest(self, since: Seconds) -> Seconds:
        """Of the answered ones."""
        return max((call.ended - call.began for call in self.calls if call.ended >= since and call.outcome == ANSWERED), default=0.0)

    def told(self, since: Seconds) -> str:
        """What clients saw since that moment, for people."""
        seen = ", ".join(f"{n} {outcome}" for outcome, n in self.outcomes(since=since).most_common())
        return f"{seen or 'none'}; away for {self.away(since):.1f} s, slowest answer {self.slowest(since):.1f} s"

    def wait_answered(self, *, limit: Seconds, n: int = 6) -> None:
        """Until so many calls that begin from now on were answered one after the other."""
        began = time.monotonic()

        def are_answered() -> bool:
            latest = [call for call in self.calls if call.began >= began][-n:]
            return len(latest) == n and all(call.outcome == ANSWERED for call in latest)

        wait_for(are_answered, lambda: f"calls are answered; they were {self.calls[-10:]}", limit=limit)

    def _run(self, model: str) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": self._n_tokens, "temperature": 0}
        while not self._stop.is_set():
            began = time.monotonic()
            outcome = _outcome(f"{self._url}/v1/chat/completions", body)
            self._calls.append(Call(began=began, ended=time.monotonic(), outcome=outcome))
            self._stop.wait(_BETWEEN)


def _outcome(url: str, body: dict[str, Any]) -> str:
    try:
        response = httpx.post(url, json=body, timeout=_PATIENCE)
    except httpx.TransportError as error:
        return type(error).__name__
    if response.is_success:
        return ANSWERED
    return f"{response.status_code} {response.json()['error']['code']}"


class Listener:
    """Context manager: a client of one long stream, in a thread of its own; the test acts while it is under way."""

    def __init__(self, url: str, model: str, *, n_tokens: int, session: str | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.failure: Exception | None = None
        self._call: Callable[[], Any] = lambda: stream(url, model, "Count, and do not stop.", n_tokens=n_tokens, session=session)
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(lambda: len(self.events) > 5 or self.failure, "the stream is under way", limit=60)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(CALL_LIMIT)
        assert not self._thread.is_alive(), "the stream neither ended nor failed"

    @property
    def is_whole(self) -> bool:
        return self.failure is None and self.events[-1:] == [{"done": True}]

    @property
    def error(self) -> str:
        """The code of the last event where that is an error; empty otherwise."""
        last = self.events[-1] if self.events else {}
        return str(last["error"]["code"]) if "error" in last else ""

    @property
    def ending(self) -> str:
        """For people."""
        how = "whole" if self.is_whole else self.error or repr(self.failure)
        return f"{how} after {len(self.events)} events"

    def _listen(self) -> None:
        try:
            for event in self._call():
                self.events.append(event)
        except httpx.TransportError as error:
            self.failure = error
