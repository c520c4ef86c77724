"""Who may write, over every order in which questions, answers and clocks may run: never two at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerostat_core.ids import Seconds
from aerostat_operator.policy.leadership import Candidacy, LeaseState, Step, Timing

pytestmark = pytest.mark.cpu
TIMING = Timing(duration=15.0, hold=10.0, retry=2.0)
FASTEST = TIMING.duration / TIMING.hold  # how many times as fast as another a clock may run
N_REPLICAS = 2
WHO = st.integers(0, N_REPLICAS - 1)
WHILES = st.sampled_from([0.0, 0.1, 1.0, 3.0, 6.6, 9.9])  # seconds; hold and duration are within a few of them


ASKING = ["prompt", "slow answer", "late request", "lost answer"]
STEPS = [*ASKING, *["prompt"] * 4, "an answer arrives", "a late request arrives", "stops", "is killed"]


@dataclass
class Server:
    """Stores one Lease; a write of another version than the stored one is refused."""

    lease: LeaseState | None = None
    n_writes: int = 0

    def write(self, wanted: LeaseState) -> LeaseState | None:
        if wanted.version != (self.lease.version if self.lease is not None else ""):
            return None
        self.n_writes += 1
        self.lease = replace(wanted, version=str(self.n_writes))
        return self.lease


@dataclass
class Replica:
    """`clock`: seconds that its own clock shows for a real one, and what it showed at the beginning."""

    own: Candidacy
    rate: float
    offset: Seconds
    late: list[LeaseState] = field(default_factory=list)  # writes on their way, which were given up
    answer: tuple[LeaseState | None, LeaseState | None, Seconds] | None = None  # of a write: stored, found, asked at

    def now(self, real: Seconds) -> Seconds:
        return self.offset + real * self.rate


class World:
    """Requests and answers are delayed, lost and delivered late; clocks are set and run differently."""

    def __init__(self, rates: Sequence[float], offsets: Sequence[Seconds]) -> None:
        self.real = 0.0
        self.server = Server()
        self.replicas = [
            Replica(own=Candidacy(identity=f"r{i}", timing=TIMING), rate=rate, offset=offset)
            for i, (rate, offset) in enumerate(zip(rates, offsets, strict=True))
        ]

    def step(self, i: int, what: str) -> None:
        match what:
            case "an answer arrives":
                self.an_answer_arrives(i)
            case "a late request arrives":
                self.a_late_request_arrives(i)
            case "stops" | "is killed":
                self.another_takes_its_place(i, gracefully=what == "stops")
            case _:
                self.one_asks(i, what)

    def one_asks(self, i: int, fate: str) -> None:
        replica = self.replicas[i]
        if replica.answer is not None:
            return  # one thing at a time
        asked_at = replica.now(self.real)
        if replica.own.step(asked_at) is Step.LOOK or replica.own.lease is None:
            replica.own = replica.own.saw(self.server.lease, asked_at)
        wanted = replica.own.wanted()
        if replica.own.step(asked_at) is Step.LOOK:
            return
        if fate == "late request":
            replica.late.append(wanted)  # nobody waits for its answer any more
        elif fate != "lost answer":
            replica.answer = (self.server.write(wanted), self.server.lease, asked_at)
            if fate == "prompt":
                self.an_answer_arrives(i)
        else:
            self.server.write(wanted)

    def an_answer_arrives(self, i: int) -> None:
        replica = self.replicas[i]
        if replica.answer is not None:
            (stored, found, asked_at), replica.answer = replica.answer, None
            now = replica.now(self.real)
            replica.own = replica.own.was_granted(stored, asked_at=asked_at, now=now) if stored is not None else replica.own.saw(found, now)

    def a_late_request_arrives(self, i: int) -> None:
        if self.replicas[i].late:
            self.server.write(self.replicas[i].late.pop())

    def another_takes_its_place(self, i: int, *, gracefully: bool) -> None:
        """What a graceful one has sent may still be on its way; of a killed one as well, but its answers reach nobody."""
        replica = self.replicas[i]
        if gracefully and replica.own.step(replica.now(self.real)) is Step.RENEW:
            self.server.write(replace(replica.own.wanted(), holder=""))
        fresh = Candidacy(identity=replica.own.identity + "'", timing=TIMING)
        self.replicas[i] = Replica(own=fresh, rate=replica.rate, offset=replica.offset)

    def check_integrity(self) -> None:
        writers = [r.own.identity for r in self.replicas if r.own.may_write(r.now(self.real))]
        assert len(writers) <= 1, f"{writers} may write at {self.real}"


@settings(max_examples=500, deadline=None)
@given(
    rates=st.tuples(*[st.sampled_from([1.0, 1.2, FASTEST * 0.999])] * N_REPLICAS),
    offsets=st.tuples(*[st.floats(0.0, 1e6)] * N_REPLICAS),
    steps=st.lists(st.tuples(WHO, st.sampled_from(STEPS), WHILES), min_size=30, max_size=60),
)
def test_at_most_one_replica_may_write_whatever_is_lost_or_late(
    rates: Sequence[float], offsets: Sequence[Seconds], steps: Sequence[tuple[int, str, Seconds]]
) -> None:
    world = World(rates, offsets)
    for i, what, seconds in steps:
        world.step(i, what)
        world.check_integrity()
        world.real += seconds
        world.check_integrity()


def lease(holder: str, version: str = "1", duration: Seconds = 15.0, n_transitions: int = 0) -> LeaseState:
    return LeaseState(holder=holder, version=version, duration=duration, n_transitions=n_transitions)


def test_a_lease_that_is_renewed_is_never_taken() -> None:
    own = Candidacy(identity="b", timing=TIMING)
    for second in range(0, 300, 10):
        own = own.saw(lease("a", version=str(second + 1)), float(second))
        assert own.step(second + 9.9) is Step.LOOK


def test_a_lease_is_taken_over_when_it_has_not_changed_for_its_duration_and_says_so() -> None:
    own = Candidacy(identity="b", timing=TIMING).saw(lease("a", n_transitions=3), 100.0)
    own = own.saw(lease("a", n_transitions=3), 110.0)
    assert own.step(114.9) is Step.LOOK
    assert own.step(115.0) is Step.TAKE
    assert own.wanted() == lease("b", n_transitions=4)


def test_the_duration_that_the_holder_promised_counts_if_it_is_longer() -> None:
    own = Candidacy(identity="b", timing=TIMING).saw(lease("a", duration=60.0), 0.0)
    assert own.step(59.0) is Step.LOOK
    assert own.step(60.0) is Step.TAKE


def test_a_lease_that_was_given_back_is_free_at_once() -> None:
    own = Candidacy(identity="b", timing=TIMING).saw(lease(""), 0.0)
    assert own.step(0.0) is Step.TAKE


def test_what_is_held_counts_from_the_question_and_not_from_the_answer() -> None:
    own = Candidacy(identity="a", timing=TIMING).was_granted(lease("a"), asked_at=0.0, now=4.0)
    assert own.may_write(9.9)
    assert not own.may_write(10.0)


def test_a_lease_that_somebody_else_holds_ends_writing_before_its_time() -> None:
    own = Candidacy(identity="a", timing=TIMING).was_granted(lease("a"), asked_at=0.0, now=0.0)
    assert not own.saw(lease("b", version="2"), 1.0).may_write(1.0)
    assert not own.saw(None, 1.0).may_write(1.0)
    assert own.saw(lease("a"), 1.0).may_write(1.0)


@given(st.floats(0.0, 40.0), st.floats(0.0, 40.0), st.floats(0.0, 40.0))
def test_timings_that_could_overlap_are_refused(retry: Seconds, hold: Seconds, duration: Seconds) -> None:
    if 0 < retry < hold < duration:
        Timing(retry=retry, hold=hold, duration=duration)
    else:
        with pytest.raises(ValueError, match="retry < hold < duration"):
            Timing(retry=retry, hold=hold, duration=duration)
