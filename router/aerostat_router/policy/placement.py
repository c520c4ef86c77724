"""Where a call goes (Talaria algorithm 1): to its lease, to the cheapest engine that may take it, or over a wake; or it waits.

The route word tells the client why: lease (a live lease was honoured), kv (the engine has the session's prefix), residency (it
has the model), wake (the call was held while the model was opened), spill (another model than the one asked for).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from aerostat_core.defaults import STALE_AFTER
from aerostat_core.ids import Epoch, NamespacedName, Seconds
from aerostat_core.specs import EngineState
from aerostat_router.policy.admission import is_worth_opening, why_not
from aerostat_router.policy.cost import Holdings, n_reusable, rank, tier_on
from aerostat_router.policy.views import CallView, Candidate, LeaseView, Tier


class Route(StrEnum):
    LEASE = "lease"
    KV = "kv"
    RESIDENCY = "residency"
    WAKE = "wake"
    SPILL = "spill"


class Discard(StrEnum):
    """Why a lease was not honoured. Values are label values of a metric."""

    EPOCH = "epoch"
    EXCLUDED = "excluded"
    DRAINING = "draining"
    NOT_OPEN = "not_open"
    MISSING = "missing"
    UNHEALTHY = "unhealthy"


class Send(NamedTuple):
    """`needs_check`: the agent is silent, so the engine is asked for its health before the lease is trusted."""

    candidate: Candidate
    route: Route
    tier: Tier
    n_reused_tokens: int
    needs_check: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Hold the call and have the model opened, best at `at`; `order` is what else could do."""

    order: tuple[Candidate, ...]


class Lack(StrEnum):
    """Why there is nothing to send to and nothing to open."""

    NO_INSTANCE = "no_instance"  # nothing may hold the model
    OPENING = "opening"  # somewhere it is coming up
    FULL = "full"  # every engine that has it is taken
    STALE = "stale"  # those that have it have not been heard of
    FAILED = "failed"  # every instance that may hold it has given up on it
    LEAVING = "leaving"  # of all instances that may hold it, some drain, and on the others it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    lack: Lack
    detail: str
    retry_after: Seconds


Placement = Send | Wake | Nothing
Excluded = Collection[tuple[NamespacedName, Epoch]]  # engine runs that failed this call already


class Situation(NamedTuple):
    """What a placement depends on beside the candidates. `n_calls` is asked for only when a new replica is considered."""

    now: Seconds
    ttft: Seconds
    replica_penalty: Callable[[NamespacedName], Seconds]  # nu, of an instance's pool
    n_calls: Callable[[], int]  # arrivals of the window plus live leases
    was_held: bool = False  # over a wake
    excluded: Excluded = ()


def judge_lease(lease: LeaseView, candidate: Candidate | None, holdings: Holdings, excluded: Excluded) -> Discard | None:
    """None: honour it. While the engine run is the same, a lease is trusted before what telemetry has not heard of yet."""
    if candidate is None or candidate.engine.epoch != lease.epoch:
        return Discard.EPOCH
    engine = candidate.engine
    if excluded and (engine.instance, engine.epoch) in excluded:
        return Discard.EXCLUDED
    if engine.is_draining:
        return Discard.DRAINING
    if not engine.can_serve:
        return Discard.NOT_OPEN
    held = holdings.get(engine.instance) if lease.is_published else None
    if held is not None and held.epoch == lease.epoch and held.tier is Tier.MISSING and held.is_reported:
        return Discard.MISSING
    return None


def honour(lease: LeaseView, call: CallView, candidate: Candidate, holdings: Holdings, now: Seconds) -> Send:
    """Of a lease that `judge_lease` found good. What telemetry has not reported yet the engine that just served it holds."""
    held = holdings.get(lease.instance)
    tier = tier_on(held, lease.epoch)
    if tier is Tier.MISSING:
        tier = Tier.DEVICE
    needs_check = candidate.source.heard_at < now - STALE_AFTER
    return Send(candidate=candidate, route=Route.LEASE, tier=tier, n_reused_tokens=n_reusable(call, holdings), needs_check=needs_check)


def place(call: CallView, candidates: Sequence[Candidate], holdings: Holdings, situation: Situation) -> Placement:
    """Without a lease. The cheapest engine that is fresh and admits the call; ties go by tier, then by name."""
    heard_after, excluded = situation.now - STALE_AFTER, situation.excluded
    able = [c for c in candidates if c.takes_calls and c.source.heard_at >= heard_after]
    if excluded:
        able = [c for c in able if (c.engine.instance, c.engine.epoch) not in excluded]
    n_prefix = n_reusable(call, holdings)
    ranked = rank(call, able, holdings, n_prefix)
    refusals: list[tuple[Candidate, str]] = []
    while ranked:
        best = min(ranked)
        _, tier, _, candidate = best
        n_reused = n_prefix if tier is not Tier.MISSING else 0
        refusal = why_not(call, candidate, ttft=situation.ttft, n_reused_tokens=n_reused)
        if refusal is None:
            route = Route.WAKE if situation.was_held else Route.RESIDENCY if tier is Tier.MISSING else Route.KV
            return Send(candidate=candidate, route=route, tier=tier, n_reused_tokens=n_reused)
        refusals.append((candidate, refusal))
        ranked.remove(best)
    return _without_engine(call, candidates, refusals, holdings, situation)


_CAN_WAKE = frozenset((EngineState.ABSENT, EngineState.PARKED, EngineState.CLOSED))


def _without_engine(
    call: CallView, candidates: Sequence[Candidate], refusals: list[tuple[Candidate, str]], holdings: Holdings, situation: Situation
) -> Placement:
    heard_after, excluded = situation.now - STALE_AFTER, situation.excluded
    alive = [
        c
        for c in candidates
        if c.source.heard_at >= heard_after
        and not c.engine.is_draining
        and not (excluded and (c.engine.instance, c.engine.epoch) in excluded)
    ]
    opening = [c.engine for c in alive if c.engine.state is EngineState.STARTING or (c.engine.is_waking and not c.engine.can_serve)]
    can_wake = [c for c in alive if c.engine.state in _CAN_WAKE and not c.engine.is_waking]
    closed = [candidate for _, _, _, candidate in sorted(rank(call, can_wake, holdings, n_reusable(call, holdings)))]
    if refusals:
        cheapest, refusal = refusals[0]
        wait = cheapest.engine.queue_seconds + cheapest.load.seconds
        worth = () if opening else tuple(c for c in closed if _is_worth(c, len(refusals), wait, situation))
        if worth:
            return Wake(order=worth)
        return Nothing(lack=Lack.FULL, detail=f"{cheapest.engine.instance.name}: {refusal}", retry_after=max(1.0, wait))
    if opening:
        left = min(max(e.open_in_seconds, 0.0) or e.open_seconds for e in opening)
        words = next((e.message for e in opening if e.message), "the model is coming up")
        return Nothing(lack=Lack.OPENING, detail=words, retry_after=max(1.0, left))
    if closed:
        return Wake(order=tuple(closed))
    return _nothing_usable(candidates, situation)


def _is_worth(candidate: Candidate, n_open: int, wait: Seconds, situation: Situation) -> bool:
    penalty = situation.replica_penalty(candidate.engine.instance)
    return is_worth_opening(candidate, n_open=n_open, n_calls=situation.n_calls(), wait=wait, replica_penalty=penalty)


def _nothing_usable(candidates: Sequence[Candidate], situation: Situation) -> Nothing:
    failed = [c.engine for c in candidates if c.engine.state is EngineState.FAILED]
    if not candidates:
        return Nothing(lack=Lack.NO_INSTANCE, detail="no instance may hold it yet", retry_after=1.0)
    if len(failed) == len(candidates):
        engine = min(failed, key=lambda e: e.instance)
        return Nothing(lack=Lack.FAILED, detail=f"{engine.instance.name}: {engine.message or engine.reason}", retry_after=30.0)
    silent = max((situation.now - c.source.heard_at for c in candidates), default=0.0)
    if silent > STALE_AFTER:
        return Nothing(lack=Lack.STALE, detail=f"its node has been silent for {silent:.1f} s", retry_after=1.0)
    if all(c.engine.is_draining or c.engine.state is EngineState.FAILED for c in candidates):
        words = "; ".join(f"{e.instance.name}: {e.message or e.reason}" for e in sorted(failed, key=lambda e: e.instance))
        return Nothing(lack=Lack.LEAVING, detail=words or "its instances are draining", retry_after=1.0)
    return Nothing(lack=Lack.OPENING, detail="its engine is being replaced, or has just failed this call", retry_after=1.0)
