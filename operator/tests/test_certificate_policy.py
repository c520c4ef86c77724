"""Who signs and who is trusted, over years: whoever works with a copy that is hours old still talks with everybody else."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerostat_core.ids import Seconds
from aerostat_core.peers import AGENT, ENGINES, ROUTER
from aerostat_operator.policy.certificates import (
    AUTHORITY_LIFE,
    DAY,
    LEAF_LIFE,
    RENEW_AT,
    SKEW,
    SPREAD,
    Authority,
    AuthorityId,
    DropAuthority,
    Fill,
    Held,
    Holding,
    Leaf,
    MakeAuthority,
    Validity,
    decide,
)

pytestmark = pytest.mark.cpu
HOUR: Seconds = 3600.0
START: Seconds = 1_800_000_000.0
PARTS = (ROUTER, AGENT, ENGINES)
# What the life of a certificate leaves to an operator that is away, when copies are as old as they may be.
AWAY = LEAF_LIFE * (1 - RENEW_AT) - SPREAD


@dataclass
class World:
    """The Secrets, and of each part's what it held in turn: a kubelet takes over only what is whole."""

    now: Seconds = START
    authorities: dict[AuthorityId, Authority] = field(default_factory=dict)
    holdings: dict[str, Holding] = field(default_factory=lambda: {name: empty(name) for name in PARTS})
    copies: dict[str, list[tuple[Seconds, Holding]]] = field(default_factory=lambda: {name: [] for name in PARTS})
    n_made: int = 0

    @property
    def held(self) -> Held:
        return Held(authorities=tuple(self.authorities.values()), holdings=tuple(self.holdings.values()))

    def check(self, n_writes: int = 100) -> list[str]:
        """What an operator does that dies after so many writes; the reasons."""
        reasons: list[str] = []
        while actions := decide(self.held, self.now):
            for action in actions:
                if len(reasons) == n_writes:
                    return reasons
                reasons.append(self.act(action))
            assert len(reasons) < 20, reasons
        self.held.check_integrity(self.now)
        return reasons

    def act(self, action: MakeAuthority | DropAuthority | Fill) -> str:
        match action:
            case MakeAuthority():
                self.n_made += 1
                made = Authority(id=AuthorityId(f"ca{self.n_made}"), validity=action.validity, can_sign=True)
                self.authorities[made.id] = made
                return f"made: {action.reason}"
            case DropAuthority():
                del self.authorities[action.id]
                return f"dropped: {action.reason}"
            case Fill(sign=sign):
                leaf = self.holdings[action.name].leaf
                if sign is not None:
                    assert self.authorities[sign.by].can_sign
                    assert sign.validity.until <= self.authorities[sign.by].validity.until
                    leaf = Leaf(issuer=sign.by, names=frozenset({action.name}), validity=sign.validity)
                self.holdings[action.name] = filled = Holding(name=action.name, leaf=leaf, trusted=dict(action.trusted))
                self.copies[action.name].append((self.now, filled))
                return f"{action.name}: {', '.join(filter(None, (action.reason, sign.reason if sign else '')))}"

    def pass_time(self, seconds: Seconds) -> None:
        """Nobody looks meanwhile. At its end, and just before, everybody still takes everybody's certificate."""
        self.now += seconds
        for now in (self.now - min(seconds, 1.0), self.now):
            self.check_copies(now)

    def check_copies(self, now: Seconds) -> None:
        """Of what was current at some time within the last SPREAD."""
        for copies in self.copies.values():
            while len(copies) > 1 and copies[1][0] <= now - SPREAD:
                copies.pop(0)
        in_use = [copy for copies in self.copies.values() for _, copy in copies]
        for one, other in product(in_use, in_use):
            assert one.accepts(other, now), f"at day {(now - START) / DAY:.2f} {one} refuses {other}"


def empty(name: str) -> Holding:
    return Holding(name=name, leaf="there is no certificate", trusted={})


def whole(*, now: Seconds = START) -> World:
    world = World(now=now)
    world.check()
    return world


# ---------------------------------------------------------------- years


GONE: Seconds = SPREAD + HOUR  # an operator that died in the midst of its writes
LOSSES = ["emptied", "bundle lost", "record lost", "wrong leaf"]
QUIET = ("nothing", 0)
EVENTS = st.lists(st.tuples(st.sampled_from(["nothing", "dies", *LOSSES]), st.integers(0, len(PARTS))), min_size=3, max_size=15)


def live(world: World, gaps: list[Seconds], events: list[tuple[str, int]], *, until: Seconds) -> None:
    """Not everything breaks all the time: a new CA needs a while in which no bundle is lost."""
    coming = zip(cycle(gaps), cycle(e for event in events for e in (event, QUIET, QUIET, QUIET)), strict=False)
    while world.now < until:
        gap, (event, n) = next(coming)
        world.pass_time(gap)
        happen(world, event, n)
        if event == "dies":
            world.check(n_writes=n)
            world.pass_time(GONE)
        world.check()
        world.check_copies(world.now)


def happen(world: World, event: str, n: int) -> None:
    """To the Secrets. What pods have does not change by it, since the next check comes before kubelets have looked."""
    name = PARTS[n % len(PARTS)]
    holding = world.holdings[name]
    assert isinstance(holding.leaf, Leaf)
    match event:
        case "emptied":
            world.holdings[name] = empty(name)
        case "bundle lost":
            world.holdings[name] = replace(holding, trusted={})
        case "record lost":
            world.holdings[name] = replace(holding, trusted=dict.fromkeys(holding.trusted))
        case "wrong leaf":
            world.holdings[name] = replace(holding, leaf=replace(holding.leaf, names=frozenset({"other"})))


@given(st.lists(st.floats(4 * HOUR, AWAY - GONE), min_size=5, max_size=40), EVENTS)
@settings(max_examples=15, deadline=None)
def test_over_years_of_outages_deaths_and_losses_everybody_takes_everybodys_certificate(
    gaps: list[Seconds], events: list[tuple[str, int]]
) -> None:
    world = whole()
    live(world, gaps, events, until=START + 2.5 * AUTHORITY_LIFE)
    assert len(world.authorities) <= 2
    assert world.n_made == 4, "each is followed by another after two thirds of a year"


@given(st.lists(st.floats(HOUR, 12 * HOUR), min_size=5, max_size=40), st.integers(0, 40))
@settings(max_examples=25, deadline=None)
def test_without_its_key_a_ca_is_replaced_and_stays_trusted(gaps: list[Seconds], days: int) -> None:
    """So people make a new one: nothing is cut."""
    world = whole()
    live(world, gaps, [QUIET], until=START + days * DAY)
    world.authorities[AuthorityId("ca1")] = replace(world.authorities[AuthorityId("ca1")], can_sign=False)
    assert world.check()[0] == "made: the key of CA ca1 is missing or not its own"
    live(world, gaps, [QUIET], until=world.now + 15 * DAY)
    assert set(world.authorities) == {"ca2"}


def test_an_operator_that_looks_every_two_minutes_does_little() -> None:
    world, reasons = whole(), list[str]()
    for _ in range(5 * 720):
        world.now += 120.0
        reasons += world.check()
    assert len(reasons) == len(PARTS), "one renewal in five days"
    assert all("the one before has 2.3 days left" in reason for reason in reasons)


# ---------------------------------------------------------------- the life of a CA


def test_a_first_ca_signs_at_once() -> None:
    world = World()
    reasons = world.check()
    assert reasons[0] == "made: there is none"
    assert reasons[1:] == [f"{name}: it lacks CA ca1, there is no certificate" for name in PARTS]
    assert world.holdings[ROUTER].leaf == Leaf(
        issuer=AuthorityId("ca1"), names=frozenset({ROUTER}), validity=Validity(since=START - SKEW, until=START + LEAF_LIFE)
    )


def test_a_new_ca_is_trusted_by_all_before_it_signs_and_the_old_one_until_all_that_it_signed_has_expired() -> None:
    world = whole()
    made_at = signed_at = dropped_at = None
    while dropped_at is None:
        world.pass_time(HOUR)
        world.check()
        issuers = {h.leaf.issuer for h in world.holdings.values() if isinstance(h.leaf, Leaf)}
        if made_at is None and world.n_made == 2:
            made_at = world.now
        if signed_at is None and AuthorityId("ca2") in issuers:
            signed_at = world.now
        if "ca1" not in world.authorities:
            dropped_at = world.now
    assert made_at is not None
    assert signed_at is not None
    assert 0 <= made_at - START - AUTHORITY_LIFE * RENEW_AT <= HOUR
    assert SPREAD <= signed_at - made_at <= SPREAD + LEAF_LIFE
    assert dropped_at - made_at >= SPREAD + LEAF_LIFE
    assert dropped_at < START + AUTHORITY_LIFE, "long before its own end"


def test_when_all_cas_are_lost_everything_is_made_anew_at_once() -> None:
    world = whole()
    world.authorities.clear()
    reasons = world.check()
    assert reasons[0] == "made: there is none"
    assert reasons[1].startswith(f"{ROUTER}: it lacks CA ca2; it trusts ca1, which is no CA of ours any more")
    assert reasons[1].endswith("the one before was signed by no CA of ours")
    assert len(reasons) == 1 + len(PARTS)


def test_what_somebody_put_into_a_bundle_is_taken_out_and_spread_nowhere() -> None:
    world = whole()
    foreign = AuthorityId("foreign")
    world.holdings[ENGINES] = replace(world.holdings[ENGINES], trusted={**world.holdings[ENGINES].trusted, foreign: START})
    assert world.check() == [f"{ENGINES}: it trusts foreign, which is no CA of ours any more"]


def test_who_was_away_for_too_long_makes_everything_anew() -> None:
    world = whole()
    world.now += 2 * AUTHORITY_LIFE
    reasons = world.check()
    assert reasons[:2] == ["dropped: it has expired", "made: there is none"]
    assert set(world.authorities) == {"ca2"}


# ---------------------------------------------------------------- what is of no use


def leafs(change: Callable[[Leaf], Leaf | str]) -> Callable[[World], None]:
    def damage(world: World) -> None:
        leaf = world.holdings[AGENT].leaf
        assert isinstance(leaf, Leaf)
        world.holdings[AGENT] = replace(world.holdings[AGENT], leaf=change(leaf))

    return damage


def moved(seconds: Seconds) -> Validity:
    return Validity(since=START + seconds, until=START + seconds + LEAF_LIFE)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (leafs(lambda _: "its key cannot be read"), "its key cannot be read"),
        (leafs(lambda leaf: replace(leaf, names=frozenset({ROUTER}))), f"the one before is for {ROUTER}"),
        (leafs(lambda leaf: replace(leaf, names=leaf.names | {ROUTER})), f"the one before is for {AGENT}, {ROUTER}"),
        (leafs(lambda leaf: replace(leaf, names=frozenset())), "the one before is for no name"),
        (leafs(lambda leaf: replace(leaf, issuer=None)), "the one before was signed by no CA of ours"),
        (leafs(lambda leaf: replace(leaf, validity=moved(-LEAF_LIFE))), "the one before has expired"),
        (leafs(lambda leaf: replace(leaf, validity=moved(DAY))), "the one before is valid only in 1.0 days: a clock was wrong"),
    ],
)
def test_a_certificate_of_no_use_is_replaced_at_once(damage: Callable[[World], None], said: str) -> None:
    world = whole()
    damage(world)
    (reason,) = world.check()
    assert reason.startswith(f"{AGENT}: {said}")
    assert isinstance(world.holdings[AGENT].leaf, Leaf)


def test_a_ca_of_another_time_goes() -> None:
    world = whole()
    ours = world.authorities[AuthorityId("ca1")]
    world.authorities[AuthorityId("ca1")] = replace(ours, validity=Validity(since=START + DAY, until=START + 9 * DAY))
    reasons = world.check()
    assert reasons[0] == "dropped: it is valid only in 1.0 days: a clock was wrong when it was made"
    assert reasons[1] == "made: there is none"


def test_what_is_no_ca_goes() -> None:
    held = replace(whole().held, damaged=((AuthorityId("x"), "its certificate cannot be read"),))
    assert decide(held, START) == (DropAuthority(id=AuthorityId("x"), reason="its certificate cannot be read"),)


def test_a_record_from_the_future_is_none() -> None:
    world = whole()
    trusted = {AuthorityId("ca1"): START + DAY}
    world.holdings[AGENT] = replace(world.holdings[AGENT], trusted=trusted)
    assert world.check() == [f"{AGENT}: it was not on record since when it has them"]
    assert world.holdings[AGENT].trusted == {"ca1": START}


def test_a_secret_that_cannot_be_filled_holds_up_no_other() -> None:
    """Its part's copy is good for as long as the old CA, so a new one does not sign before it is trusted there."""
    world = whole()
    gone = empty(ENGINES)
    for _ in range(int(AUTHORITY_LIFE / DAY) - 10):
        world.now += DAY
        world.holdings[ENGINES] = gone
        while actions := [a for a in decide(world.held, world.now) if not isinstance(a, Fill) or a.name != ENGINES]:
            for action in actions:
                world.act(action)
        assert world.holdings[ROUTER].accepts(world.holdings[AGENT], world.now)
        leaf = world.holdings[ROUTER].leaf
        assert isinstance(leaf, Leaf)
        assert leaf.issuer == "ca1"
    assert set(world.authorities) == {"ca1", "ca2"}
