"""Certificates of mTLS between parts: which CA signs, which ones are trusted, what is renewed when. Pure.

Pods see what a Secret holds with a delay: each works with a copy. Nothing is done that a copy younger than SPREAD would not bear:

    a new CA         is in every bundle for SPREAD before it signs
    a certificate    is renewed while it is good for a third of its life
    an old CA        leaves the bundles when all that it signed has expired

Only what is of no use at all (missing, damaged, expired) is replaced without that patience. A bundle has the CAs of the CA's Secret
and no others: what somebody else put into one is trusted nowhere.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Final, NewType

from aerostat_core.ids import Seconds

DAY: Final[Seconds] = 86_400.0
# Nobody has to do anything when a CA is replaced, so its life only says how long a stolen key is of use before anybody notices;
# a third of it, four months, is what an operator may be away without every part losing trust in every other.
AUTHORITY_LIFE: Final[Seconds] = 365 * DAY
# There are no revocation lists: a stolen key is of use for this long. A third of it, more than two days, is for outages.
LEAF_LIFE: Final[Seconds] = 7 * DAY
RENEW_AT: Final = 2 / 3  # of a life
# A kubelet needs about two minutes; one that cannot reach the API server, or is being upgraded, gets some hours.
SPREAD: Final[Seconds] = 6 * 3600.0
# Clocks of nodes differ: what is new is valid from a little before.
SKEW: Final[Seconds] = 300.0

AuthorityId = NewType("AuthorityId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """Seconds since 1970."""

    since: Seconds
    until: Seconds

    def covers(self, now: Seconds) -> bool:
        return self.since <= now < self.until

    def is_due(self, now: Seconds) -> bool:
        """For renewal."""
        return now >= self.since + (self.until - self.since) * RENEW_AT


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A CA. One that lost its key cannot sign, and stays trusted for what it did sign."""

    id: AuthorityId
    validity: Validity
    can_sign: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A certificate of a part. `issuer` None: signed by no CA that we hold."""

    issuer: AuthorityId | None
    names: frozenset[str]
    validity: Validity


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What the Secret of the part called `name` holds. `leaf`: a certificate with its key, or why there is none.

    `trusted`: the CAs of its bundle, and since when it has each; None where that is not on record.
    """

    name: str
    leaf: Leaf | str
    trusted: Mapping[AuthorityId, Seconds | None]

    def accepts(self, other: "Holding", now: Seconds) -> bool:
        """Who works with this one takes the certificate of who works with the other one."""
        leaf = other.leaf
        return isinstance(leaf, Leaf) and leaf.names == {other.name} and leaf.validity.covers(now) and leaf.issuer in self.trusted


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """All that the Secrets hold. `damaged`: what is no CA among the CAs, and why."""

    authorities: tuple[Authority, ...]
    holdings: tuple[Holding, ...]
    damaged: tuple[tuple[AuthorityId, str], ...] = ()

    def check_integrity(self, now: Seconds) -> None:
        """When there is nothing to do: everybody takes everybody's certificate, and who signs next is trusted by all."""
        for one, other in product(self.holdings, self.holdings):
            assert one.accepts(other, now), f"at {now:.0f} {one.name} refuses {other.name}: {other.leaf} by {sorted(one.trusted)}"
        newest = _newest(self.authorities)
        assert newest is not None, "there is no CA"
        assert newest.can_sign, "nobody can sign what comes next"
        assert all(newest.id in holding.trusted for holding in self.holdings), f"not all trust CA {newest.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeAuthority:
    validity: Validity
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropAuthority:
    id: AuthorityId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    by: AuthorityId
    validity: Validity
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Write the Secret of that part: the bundle with its record, and a new certificate unless `sign` is None. `reason`: of the bundle."""

    name: str
    trusted: Mapping[AuthorityId, Seconds]
    sign: Sign | None
    reason: str


Action = MakeAuthority | DropAuthority | Fill


def decide(held: Held, now: Seconds) -> tuple[Action, ...]:
    """The next step; () when all is as it shall be. CAs come first: only when none is to be made or dropped, Secrets are filled."""
    steps: tuple[Action, ...] = (*_dropped(held, now), *_made(held, now))
    if steps:
        return steps
    fills = (_filled(held, holding, now) for holding in held.holdings)
    return tuple(fill for fill in fills if fill is not None)


# ---------------------------------------------------------------- CAs


def _made(held: Held, now: Seconds) -> tuple[MakeAuthority, ...]:
    newest = _newest(a for a in held.authorities if a.validity.covers(now))
    if newest is None:
        reason = "there is none"
    elif not newest.can_sign:
        reason = f"the key of CA {newest.id} is missing or not its own"
    elif newest.validity.is_due(now):
        reason = f"CA {newest.id} has {_days(newest.validity.until - now)} left"
    else:
        return ()
    return (MakeAuthority(validity=Validity(since=now - SKEW, until=now + AUTHORITY_LIFE), reason=reason),)


def _dropped(held: Held, now: Seconds) -> tuple[DropAuthority, ...]:
    reasons = dict(held.damaged) | {a.id: why for a in held.authorities if (why := _why_dropped(held, a, now))}
    return tuple(DropAuthority(id=id_, reason=why) for id_, why in reasons.items())


def _why_dropped(held: Held, authority: Authority, now: Seconds) -> str:
    validity = authority.validity
    if now >= validity.until:
        return "it has expired"
    if now < validity.since:
        return f"it is valid only in {_days(validity.since - now)}: a clock was wrong when it was made"
    if any(isinstance(h.leaf, Leaf) and h.leaf.issuer == authority.id for h in held.holdings):
        return ""
    # From when a newer one could sign, this one did not.
    newer = [a for a in held.authorities if _age(a) > _age(authority) and a.can_sign and a.validity.covers(now)]
    last_signed = min((_signs_from(held, a.id, now) for a in newer), default=inf)
    return "all that it signed has expired" if now >= last_signed + LEAF_LIFE else ""


def _signs_from(held: Held, authority: AuthorityId, now: Seconds) -> Seconds:
    """When every copy of every bundle has it."""
    return max((_since(h, authority, now) for h in held.holdings), default=now) + SPREAD


def _signer(held: Held, leaf: Leaf | None, now: Seconds) -> Authority | None:
    """For what comes after `leaf`; None: wait. Where no CA is known to be trusted by all, the one that signed `leaf` is as good as `leaf`.

    Without a `leaf` there is nothing to wait with, and the oldest is the one that most copies are likely to have.
    """
    able = [a for a in held.authorities if a.can_sign and a.validity.covers(now)]
    spread = [a for a in able if _signs_from(held, a.id, now) <= now or _is_in_use(held, a.id, now)]
    same = [a for a in able if leaf is not None and a.id == leaf.issuer]
    return _newest(spread) or _newest(same) or (min(able, key=_age) if leaf is None else None)


def _is_in_use(held: Held, authority: AuthorityId, now: Seconds) -> bool:
    """For so long that all have it, whatever became of the record: it was in the bundles before it signed."""
    leaves = [h.leaf for h in held.holdings if isinstance(h.leaf, Leaf) and h.leaf.issuer == authority]
    return any(leaf.validity.covers(now) and now >= leaf.validity.since + SKEW + SPREAD for leaf in leaves)


# ---------------------------------------------------------------- the Secrets of the parts


def _filled(held: Held, holding: Holding, now: Seconds) -> Fill | None:
    wanted = {a.id: _since(holding, a.id, now) for a in held.authorities}
    bundle = _why_bundle(holding, wanted)
    sign = _signed(held, holding, now)
    if not bundle and sign is None:
        return None
    return Fill(name=holding.name, trusted=wanted, sign=sign, reason=bundle)


def _why_bundle(holding: Holding, wanted: Mapping[AuthorityId, Seconds]) -> str:
    added, removed = (sorted(ids) for ids in (wanted.keys() - holding.trusted.keys(), holding.trusted.keys() - wanted.keys()))
    said = [f"it lacks CA {', '.join(added)}"] if added else []
    said += [f"it trusts {', '.join(removed)}, which is no CA of ours any more"] if removed else []
    if not said and wanted != holding.trusted:
        said = ["it was not on record since when it has them"]
    return "; ".join(said)


def _signed(held: Held, holding: Holding, now: Seconds) -> Sign | None:
    leaf = holding.leaf if isinstance(holding.leaf, Leaf) else None
    if reason := _why_useless(held, holding, now):
        leaf = None
    elif leaf is not None and leaf.validity.is_due(now):
        reason = f"the one before has {_days(leaf.validity.until - now)} left"
    if not reason or (by := _signer(held, leaf, now)) is None:
        return None
    validity = Validity(since=now - SKEW, until=min(now + LEAF_LIFE, by.validity.until))
    return Sign(by=by.id, validity=validity, reason=reason)


def _why_useless(held: Held, holding: Holding, now: Seconds) -> str:
    """Empty: it is of use. Nobody takes a useless one, so replacing it at once breaks nothing."""
    leaf = holding.leaf
    if isinstance(leaf, str):
        return leaf
    if leaf.names != {holding.name}:
        return f"the one before is for {', '.join(sorted(leaf.names)) or 'no name'}"
    if leaf.issuer not in {a.id for a in held.authorities}:
        return "the one before was signed by no CA of ours"
    if now >= leaf.validity.until:
        return "the one before has expired"
    if now < leaf.validity.since:
        return f"the one before is valid only in {_days(leaf.validity.since - now)}: a clock was wrong when it was made"
    return ""


def _since(holding: Holding, authority: AuthorityId, now: Seconds) -> Seconds:
    """What the future holds is not on record."""
    since = holding.trusted.get(authority)
    return since if since is not None and since <= now else now


def _newest(authorities: Iterable[Authority]) -> Authority | None:
    return max(authorities, key=_age, default=None)


def _age(authority: Authority) -> tuple[Seconds, AuthorityId]:
    """Larger is newer."""
    return authority.validity.since, authority.id


def _days(seconds: Seconds) -> str:
    return f"{seconds / DAY:.1f} days"
