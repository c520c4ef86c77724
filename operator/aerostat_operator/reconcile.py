"""One reconciler over the `Cluster` port: plan (pure), execute what differs, settle. Who calls it, and when, is `loop`'s."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from aerostat_core.clock import Clock
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_operator.backoff import Backoff
from aerostat_operator.mirror import Mirror
from aerostat_operator.policy.plan import plan
from aerostat_operator.policy.world import Learned
from aerostat_operator.reading import read_world
from aerostat_operator.writes import Verb, Write, writes_of
from aerostat_runtime.cluster.port import Cluster, Kind, Note

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one run came to. `retry`: seconds until a failed write is due again. `failed`: reasons of those that failed in it."""

    seconds: Seconds = 0.0
    retry: Seconds | None = None
    failed: list[str] = field(default_factory=list)
    n_moves: int = 0
    pressures: Mapping[NamespacedName, float] = field(default_factory=dict)


class Reconciler:
    """Level-triggered: each run looks at everything, so what was missed, or failed, is seen again."""

    def __init__(self, cluster: Cluster, clock: Clock, mirror: Mirror, *, url: str) -> None:
        self._cluster = cluster
        self._clock = clock
        self._mirror = mirror
        self._url = url
        self._learned = Learned()
        self._backoff = Backoff()
        self._told: dict[tuple[Kind, NamespacedName], tuple[Note, ...]] = {}
        self.busy_since: Seconds | None = None  # monotonic; None between runs

    async def reconcile(self) -> Outcome:
        """One run. A write that fails holds up no other one."""
        self.busy_since = self._clock.monotonic()
        objects = self._mirror.objects
        decided = plan(read_world(objects), self._learned, now=self._clock.wall(), url=self._url)
        writes = writes_of(decided, objects)
        self._backoff.keep_only(writes)
        before = {(pool, move) for pool, moves in self._learned.moves.items() for move in moves}
        started = {(pool, move) for pool, moves in decided.learned.moves.items() for move in moves} - before
        outcome = Outcome(n_moves=len(started), pressures=decided.pressures)
        delays = [delay for write in writes if (delay := await self._attempt(write, outcome)) is not None]
        self._learned = decided.learned
        outcome.retry = min(delays, default=None)
        outcome.seconds = self._clock.monotonic() - self.busy_since
        self.busy_since = None
        return outcome

    async def _attempt(self, write: Write, outcome: Outcome) -> Seconds | None:
        """Seconds until a write that failed is due again."""
        now = self._clock.monotonic()
        if not self._backoff.is_due(write, now):
            return self._backoff.remaining(write, now)
        try:
            await self._execute(write)
        except (TemporaryError, PermanentError) as error:
            delay = self._backoff.failed(write, error, now)
            outcome.failed.append(error.reason)
            _log.warning("cannot %s (again in %.1f s): %s: %s", write, delay, error.reason, error)
            return delay
        except Exception as error:  # the task's edge: loud, and no other object suffers
            delay = self._backoff.failed(write, error, now)
            outcome.failed.append("Unexpected")
            _log.exception("cannot %s (again in %.1f s)", write, delay)
            return delay
        self._backoff.succeeded(write)
        await self._tell(write)
        return None

    async def _execute(self, write: Write) -> None:
        key = (write.kind, write.name)
        if write.verb is Verb.DELETE:
            await self._cluster.delete(write.kind, write.name)
            self._mirror.removed(key)
        elif write.verb is Verb.APPLY:
            assert write.resource is not None, "an apply has its object"
            self._mirror.applied(write.kind, await self._cluster.apply(write.resource))
        else:
            assert write.resource is not None, "a status write has its status"
            if await self._cluster.patch_status(write.kind, write.name, write.resource):
                self._mirror.patched(key, write.resource)

    async def _tell(self, write: Write) -> None:
        """Notes of a transition, once: not again when a late watch event makes it look new."""
        key = (write.kind, write.name)
        for note in write.notes:
            if note not in self._told.get(key, ()):
                _log.log(logging.WARNING if note.warning else logging.INFO, "%s %s: %s: %s", *key, note.reason, note.message)
                await self._cluster.note(note)
        if write.notes:
            self._told[key] = write.notes
