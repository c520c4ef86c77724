"""One model on one instance, as the agent follows it: from no process over starting and open to no process again.

    IDLE -> STARTING -> OPEN -> DRAINING -> ENDING -> IDLE
               |         |                    ^
               +---------+--------------------+   a failure, or nobody wants it before it is open

A track is a value; each transition returns the next one. `attempts` remembers failures across processes.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

from aerostat_agent.policy.memory import Footprint
from aerostat_core.defaults import RESTART_DELAYS
from aerostat_core.ids import Epoch, ModelName, NamespacedName, Seconds

STABLE_AFTER: Final[Seconds] = 300.0  # open for so long: what failed before counts no more
MAX_PORT_RETRIES: Final = 3  # in a row; a port that another process took says nothing about the model


@dataclass(frozen=True, slots=True, order=True)
class EngineKey:
    instance: NamespacedName
    model: ModelName

    def __str__(self) -> str:
        return f"{self.model} on {self.instance}"


class Phase(StrEnum):
    IDLE = "Idle"  # no process
    STARTING = "Starting"  # not all ranks have said hello, or the token probe has not passed
    OPEN = "Open"
    DRAINING = "Draining"  # published as such; running calls finish
    ENDING = "Ending"  # it was told to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`reason` is CamelCase. A permanent one is not retried until the spec changes."""

    reason: str
    message: str
    is_permanent: bool = False
    is_port_taken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Failures in a row of one fingerprint. `retry_at` is infinite once there is no further try."""

    fingerprint: str = ""
    n_failures: int = 0
    n_ports_taken: int = 0
    retry_at: Seconds = 0.0
    last: Failure | None = None

    def of(self, fingerprint: str) -> "Attempts":
        """These, or none yet when they were about something else."""
        return self if self.fingerprint == fingerprint else Attempts(fingerprint=fingerprint)

    @property
    def is_exhausted(self) -> bool:
        return math.isinf(self.retry_at)

    @property
    def has_one_left(self) -> bool:
        return self.n_failures == len(RESTART_DELAYS) and not self.is_exhausted

    def failed(self, failure: Failure, now: Seconds) -> Self:
        if failure.is_port_taken and self.n_ports_taken < MAX_PORT_RETRIES:
            return replace(self, n_ports_taken=self.n_ports_taken + 1, retry_at=now, last=failure)
        n = self.n_failures + 1
        is_last = failure.is_permanent or n > len(RESTART_DELAYS)
        retry_at = math.inf if is_last else now + RESTART_DELAYS[n - 1]
        return replace(self, n_failures=n, n_ports_taken=0, retry_at=retry_at, last=failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """`epoch`, `footprint` belong to the process and are None without one. Times are of one monotonic clock.

    `may_serve`: routers may have calls on it though it is not open here (adopted from an agent before this one).
    `fault`: what was found wrong with it; the next plan ends it. `ending_for`: why the agent ends it; None when nothing is wrong with it.
    """

    key: EngineKey
    phase: Phase = Phase.IDLE
    since: Seconds = 0.0  # in this phase
    epoch: Epoch | None = None
    fingerprint: str = ""  # what the process runs
    footprint: Footprint | None = None
    deadline: Seconds = math.inf  # of STARTING
    open_since: Seconds | None = None
    may_serve: bool = False
    was_seen_idle: bool = False  # while DRAINING, after routers knew
    was_killed: bool = False
    fault: Failure | None = None
    ending_for: Failure | None = None
    attempts: Attempts = Attempts()

    @property
    def has_process(self) -> bool:
        return self.phase is not Phase.IDLE

    def started(self, *, epoch: Epoch, fingerprint: str, footprint: Footprint, now: Seconds, limit: Seconds) -> Self:
        return replace(
            self,
            phase=Phase.STARTING,
            since=now,
            epoch=epoch,
            fingerprint=fingerprint,
            footprint=footprint,
            deadline=now + limit,
            attempts=self.attempts.of(fingerprint),
        )

    def adopted(self, *, epoch: Epoch, fingerprint: str, footprint: Footprint, now: Seconds, limit: Seconds) -> Self:
        """A process of an earlier agent; its engine says hello again."""
        return replace(self.started(epoch=epoch, fingerprint=fingerprint, footprint=footprint, now=now, limit=limit), may_serve=True)

    def opened(self, now: Seconds) -> Self:
        """All ranks are here and the token probe passed. Too late when the end was already decided."""
        if self.phase is not Phase.STARTING or self.fault is not None:
            return self
        return replace(self, phase=Phase.OPEN, since=now, open_since=now, deadline=math.inf, may_serve=True)

    def faulted(self, failure: Failure) -> Self:
        """Something is wrong with it: its token probe, its health, its link."""
        return replace(self, fault=failure) if self.phase in (Phase.STARTING, Phase.OPEN) else self

    def draining(self, now: Seconds) -> Self:
        return replace(self, phase=Phase.DRAINING, since=now, deadline=math.inf, was_seen_idle=False, fault=None)

    def seen_idle(self) -> Self:
        return replace(self, was_seen_idle=True) if self.phase is Phase.DRAINING else self

    def ending(self, now: Seconds, failure: Failure | None = None) -> Self:
        """It was told to end, in peace (None) or for a failure."""
        return replace(self, phase=Phase.ENDING, since=now, deadline=math.inf, fault=None, ending_for=failure)

    def killed(self, now: Seconds) -> Self:
        return replace(self, was_killed=True, since=now)

    def exited(self, now: Seconds, failure: Failure) -> Self:
        """Its process is gone. `failure` is what its end looked like, used when nobody asked for the end."""
        if self.phase is Phase.IDLE:
            return self
        cause = self.ending_for if self.phase is Phase.ENDING else None if self.phase is Phase.DRAINING else failure
        is_stable = self.open_since is not None and now - self.open_since >= STABLE_AFTER
        attempts = self.attempts.of(self.fingerprint)
        if is_stable or cause is None:
            attempts = Attempts(fingerprint=self.fingerprint)
        if cause is not None:
            attempts = attempts.failed(cause, now)
        return type(self)(key=self.key, since=now, attempts=attempts)

    def not_started(self, now: Seconds, fingerprint: str, failure: Failure) -> Self:
        """A start failed before there was a process."""
        return replace(self, attempts=self.attempts.of(fingerprint).failed(failure, now))

    def check_integrity(self) -> None:
        """Raises AssertionError. Run after every step of a property test."""
        assert (self.epoch is not None) == (self.footprint is not None) == self.has_process, self
        assert self.phase is Phase.STARTING or math.isinf(self.deadline), self
        assert self.phase is not Phase.OPEN or self.open_since is not None, self
        assert self.phase is Phase.ENDING or self.ending_for is None, self
        assert self.phase in (Phase.STARTING, Phase.OPEN) or self.fault is None, self
        assert self.attempts.n_failures <= len(RESTART_DELAYS) + 1, self
