"""When a write that failed may be tried again. Pure: `now` comes in.

By kind of failure: a temporary one says itself when; a permanent one waits long, since only other content can help; an
unexpected one doubles its wait. Other content is tried at once.
"""

from dataclasses import dataclass, replace

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_operator.writes import Verb, Write
from aerostat_runtime.cluster.port import Kind

FIRST_DELAY: Seconds = 0.5
LONGEST_DELAY: Seconds = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    write: Write
    attempts: int
    due: Seconds


class Backoff:
    def __init__(self) -> None:
        self._failures: dict[tuple[Verb, Kind, NamespacedName], _Failure] = {}

    def is_due(self, write: Write, now: Seconds) -> bool:
        failure = self._failures.get(write.key)
        return failure is None or not _is_same(failure.write, write) or now >= failure.due

    def remaining(self, write: Write, now: Seconds) -> Seconds:
        """Seconds until a failed write is due."""
        return max(self._failures[write.key].due - now, 0.0)

    def failed(self, write: Write, error: Exception, now: Seconds) -> Seconds:
        """Seconds until it is tried again."""
        before = self._failures.get(write.key)
        attempts = before.attempts + 1 if before is not None and _is_same(before.write, write) else 1
        delay = min(FIRST_DELAY * 2.0 ** min(attempts - 1, 10), LONGEST_DELAY)
        if isinstance(error, TemporaryError):
            delay = max(delay, error.retry_after)
        elif isinstance(error, PermanentError):
            delay = LONGEST_DELAY
        self._failures[write.key] = _Failure(write=write, attempts=attempts, due=now + delay)
        return delay

    def succeeded(self, write: Write) -> None:
        self._failures.pop(write.key, None)

    def keep_only(self, writes: list[Write]) -> None:
        """Forget the failures of writes that nobody wants any more."""
        wanted = {write.key for write in writes}
        self._failures = {key: failure for key, failure in self._failures.items() if key in wanted}


def _is_same(a: Write, b: Write) -> bool:
    """The same content; what would be told about it does not count."""
    return replace(a, notes=()) == replace(b, notes=())
