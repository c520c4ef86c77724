"""Which replica of the operator writes: a Lease object, and what one candidate knows of it. Pure.

No clock is compared with another one. A candidate may write for `hold` after it asked for a renewal that was granted; it
takes over a Lease that it has itself seen unchanged for `duration`. Every write names the version that it replaces, so
of two that ask one is refused. What one may do ends before another one's begins as long as no clock runs `duration / hold`
times as fast as another, however far apart they are set.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

from aerostat_core.ids import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """`hold` is less than `duration` by what a write that was sent in time may still be on its way."""

    duration: Seconds = 15.0
    hold: Seconds = 10.0
    retry: Seconds = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry < self.hold < self.duration:
            raise ValueError(f"a lease needs retry < hold < duration, got {self.retry:g}, {self.hold:g} and {self.duration:g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseState:
    """A Lease as it is stored. `holder` empty: given back. `n_transitions`: how often it changed hands."""

    holder: str
    version: str
    duration: Seconds
    n_transitions: int = 0


class Step(Enum):
    LOOK = "look"  # nothing is to be had now
    CREATE = "create"
    TAKE = "take"
    RENEW = "renew"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidacy:
    """`lease` None: there is none, as far as we know. `seen_at`: when we first saw this version of it."""

    identity: str
    timing: Timing = field(default_factory=Timing)
    lease: LeaseState | None = None
    seen_at: Seconds = 0.0
    held_until: Seconds | None = None

    def may_write(self, now: Seconds) -> bool:
        return self.held_until is not None and now < self.held_until

    def step(self, now: Seconds) -> Step:
        """What to ask the server for, `retry` after the last time."""
        lease = self.lease
        if lease is None:
            return Step.CREATE
        if lease.holder == self.identity:
            return Step.RENEW
        is_over = now - self.seen_at >= max(lease.duration, self.timing.duration)
        return Step.TAKE if not lease.holder or is_over else Step.LOOK

    def wanted(self) -> LeaseState:
        """The Lease that we would write, over the version that we know."""
        known = self.lease
        changes_hands = known is not None and known.holder != self.identity
        return LeaseState(
            holder=self.identity,
            version=known.version if known is not None else "",
            duration=self.timing.duration,
            n_transitions=(known.n_transitions if known is not None else 0) + changes_hands,
        )

    def saw(self, lease: LeaseState | None, now: Seconds) -> Self:
        """The server's answer to a look, which came at `now`."""
        mine = lease is not None and lease.holder == self.identity
        held_until = self.held_until if mine else None
        is_news = lease is None or self.lease is None or lease.version != self.lease.version
        return replace(self, lease=lease, seen_at=now if is_news else self.seen_at, held_until=held_until)

    def was_granted(self, lease: LeaseState, *, asked_at: Seconds, now: Seconds) -> Self:
        """Our write is stored. What counts is when we sent it: from then on another one may have waited."""
        return replace(self, lease=lease, seen_at=now, held_until=asked_at + self.timing.hold)

    def gave_up(self) -> Self:
        """From now on we write nothing, whatever the Lease says."""
        return replace(self, held_until=None)
