"""Placement, admission, identity and the small policies: properties first, then the examples that a reader wants to see."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.ids import Epoch, LeaseId, ModelName, NamespacedName, SessionKey
from aerostat_core.latency import LatencyProfile
from aerostat_core.prefix_hash import inferred_session_key, message_chain
from aerostat_core.specs import EngineState, Overload, OverloadPolicy
from aerostat_router.policy.admission import is_worth_opening, why_not
from aerostat_router.policy.cost import cost, rank
from aerostat_router.policy.demand import Demand, DemandWindow, Sight
from aerostat_router.policy.estimates import TokenEstimates
from aerostat_router.policy.overload import Shedding, on_overload
from aerostat_router.policy.placement import Discard, Lack, Nothing, Route, Send, Situation, Wake, honour, judge_lease, place
from aerostat_router.policy.session_spans import SessionSpans
from aerostat_router.policy.sessions import (
    OwnSessions,
    SessionIdError,
    continued_session,
    given_session_id,
    is_final,
    tenant_of,
)
from aerostat_router.policy.views import CallView, Candidate, EngineView, LeaseView, Load, SessionView, Source, Tier, Timing
from aerostat_router.policy.wake_owner import wake_order

pytestmark = pytest.mark.cpu

MODEL = NamespacedName("default", "m")
TIMING = Timing.of(LatencyProfile(prefill={1: 0.001, 1024: 1.0}, decode={1: 0.01, 8: 0.02}))
CALL = CallView(model=MODEL, session=SessionKey("s"), n_prompt_tokens=100, n_output_tokens=10)
NOW = 100.0
PUBLISHED = LeaseView(
    id=LeaseId("l"),
    session=SessionKey("s"),
    model=MODEL,
    instance=NamespacedName("default", "a"),
    epoch=Epoch(1),
    expires_at=NOW + 1,
    is_published=True,
)
SITUATION = Situation(now=NOW, ttft=5.0, replica_penalty=lambda instance: 0.0, n_calls=lambda: 100)


def name(instance: str) -> NamespacedName:
    return NamespacedName("default", instance)


def candidate(instance: str, *, state: EngineState = EngineState.OPEN, heard_at: float = NOW, **figures: object) -> Candidate:
    fixed = {"instance": name(instance), "model": MODEL, "state": state, "epoch": Epoch(1), "timing": TIMING, "port": 1, "max_running": 4}
    return Candidate(EngineView(**(fixed | figures)), Load(), Source("agent", heard_at))  # type: ignore[arg-type]


def holding(instance: str, tier: Tier = Tier.DEVICE, n_tokens: int = 90, epoch: int = 1) -> dict[NamespacedName, SessionView]:
    view = SessionView(session=SessionKey("s"), model=MODEL, instance=name(instance), epoch=Epoch(epoch), tier=tier, n_tokens=n_tokens)
    return {name(instance): view}


candidates = st.lists(
    st.builds(
        candidate,
        st.sampled_from("abcdefgh"),
        state=st.sampled_from(EngineState),
        heard_at=st.sampled_from([NOW, NOW - 10]),
        running=st.integers(0, 6),
        queue_seconds=st.floats(0, 20),
        open_seconds=st.floats(0, 30),
        is_draining=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda c: c.engine.instance,
)


@given(candidates, st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(found: list[Candidate], random: st.DataObject) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def words(placement: Send | Wake | Nothing) -> object:
        if isinstance(placement, Send):
            return placement.candidate.engine.instance, placement.route
        return [c.engine.instance for c in placement.order] if isinstance(placement, Wake) else (placement.lack, placement.detail)

    assert words(place(CALL, found, {}, SITUATION)) == words(place(CALL, shuffled, {}, SITUATION))


@given(candidates)
def test_only_fresh_open_engines_that_take_new_calls_are_chosen_and_nothing_cheaper_was_left(found: list[Candidate]) -> None:
    placement = place(CALL, found, {}, SITUATION)
    allowed = [
        c
        for c in found
        if c.source.heard_at == NOW
        and c.engine.can_serve
        and not c.engine.is_draining
        and why_not(CALL, c, ttft=5.0, n_reused_tokens=0) is None
    ]
    if not allowed:
        assert not isinstance(placement, Send)
        return
    assert isinstance(placement, Send)
    chosen = cost(CALL, placement.candidate, Tier.MISSING, 0).total
    assert placement.candidate in allowed
    assert chosen == min(cost(CALL, c, Tier.MISSING, 0).total for c in allowed)


@given(candidates)
def test_whatever_is_woken_is_closed_and_known_to_be_alive(found: list[Candidate]) -> None:
    placement = place(CALL, found, {}, SITUATION)
    if isinstance(placement, Wake):
        assert placement.order
        assert all(c.engine.state in (EngineState.ABSENT, EngineState.PARKED, EngineState.CLOSED) for c in placement.order)
        assert all(c.source.heard_at == NOW for c in placement.order)


def test_kv_outweighs_a_short_queue_and_a_long_queue_outweighs_kv() -> None:
    held = holding("a", n_tokens=90)
    idle = candidate("b")
    short = place(CALL, [candidate("a", queue_seconds=0.01), idle], held, SITUATION)
    assert isinstance(short, Send)
    assert (short.candidate.engine.instance.name, short.route, short.tier) == ("a", Route.KV, Tier.DEVICE)
    long = place(CALL, [candidate("a", queue_seconds=3.0), idle], held, SITUATION)
    assert isinstance(long, Send)
    assert (long.candidate.engine.instance.name, long.route) == ("b", Route.RESIDENCY)


def test_each_cause_is_charged_once() -> None:
    parked = candidate("a", state=EngineState.PARKED, open_seconds=2.0, queue_seconds=0.5)
    missing = cost(CALL, parked, Tier.MISSING, 60)
    assert missing.activation == 2.0
    assert missing.kv == pytest.approx(TIMING.prefill.seconds(100) - TIMING.prefill.seconds(40))
    assert missing.work == pytest.approx(0.5 + TIMING.prefill.seconds(40) + 10 * TIMING.decode.seconds(1))
    assert cost(CALL, parked, Tier.DEVICE, 60).kv == 0.0


def test_of_equal_costs_the_first_by_name_is_taken() -> None:
    assert [name for _, _, name, _ in sorted(rank(CALL, [candidate("b"), candidate("a")], {}, 0))] == ["a", "b"]


@given(candidates, st.sampled_from(Tier), st.integers(0, 150))
def test_the_ranking_is_by_the_cost_that_is_explained(found: list[Candidate], tier: Tier, n_tokens: int) -> None:
    held = holding("a", tier, n_tokens)
    for total, tier_there, instance, one in rank(CALL, found, held, min(n_tokens, 99)):
        assert tier_there is (tier if instance == "a" else Tier.MISSING)
        assert total == pytest.approx(cost(CALL, one, tier_there, min(n_tokens, 99)).total)


def test_kv_of_an_older_engine_run_counts_as_missing() -> None:
    placement = place(CALL, [candidate("a")], holding("a", epoch=7), SITUATION)
    assert isinstance(placement, Send)
    assert placement.route is Route.RESIDENCY


def test_a_closed_model_is_woken_where_it_opens_cheapest_and_a_starting_one_is_waited_for() -> None:
    cold = [candidate("a", state=EngineState.ABSENT, open_seconds=30), candidate("b", state=EngineState.PARKED, open_seconds=1)]
    woken = place(CALL, cold, {}, SITUATION)
    assert isinstance(woken, Wake)
    assert [c.engine.instance.name for c in woken.order] == ["b", "a"]
    starting = [candidate("a", state=EngineState.STARTING, is_waking=True, open_in_seconds=7.0), cold[1]]
    waiting = place(CALL, starting, {}, SITUATION)
    assert isinstance(waiting, Nothing)
    assert (waiting.lack, waiting.retry_after) == (Lack.OPENING, 7.0)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        pytest.param(candidate("b", state=EngineState.ABSENT, is_draining=True), "draining", id="all drain"),
        pytest.param(candidate("b", state=EngineState.FAILED, message="out of luck"), "b: out of luck", id="the other failed"),
    ],
)
def test_where_instances_drain_and_the_others_failed_nothing_is_being_opened(other: Candidate, words: str) -> None:
    nothing = place(CALL, [candidate("a", is_draining=True), other], {}, SITUATION)
    assert isinstance(nothing, Nothing)
    assert nothing.lack is Lack.LEAVING
    assert words in nothing.detail


def test_an_engine_that_is_replaced_or_that_just_failed_the_call_is_waited_for() -> None:
    only = candidate("a")
    excluded = Situation(
        now=NOW, ttft=5.0, replica_penalty=lambda instance: 0.0, n_calls=lambda: 0, excluded={(only.engine.instance, only.engine.epoch)}
    )
    for candidates, situation in (([only], excluded), ([candidate("a", state=EngineState.DRAINING)], SITUATION)):
        nothing = place(CALL, candidates, {}, situation)
        assert isinstance(nothing, Nothing)
        assert nothing.lack is Lack.OPENING


def test_a_new_replica_is_opened_only_when_its_gain_exceeds_its_price() -> None:
    full = candidate("a", running=4, queue_seconds=20.0, max_running=4)
    spare = candidate("b", state=EngineState.PARKED, open_seconds=2.0)
    assert isinstance(place(CALL, [full, spare], {}, SITUATION), Wake)
    few = Situation(now=NOW, ttft=5.0, replica_penalty=lambda instance: 0.0, n_calls=lambda: 0)
    refused = place(CALL, [full, spare], {}, few)
    assert isinstance(refused, Nothing)
    assert refused.lack is Lack.FULL
    assert not is_worth_opening(spare, n_open=1, n_calls=1, wait=4.0, replica_penalty=0.0)
    assert is_worth_opening(spare, n_open=1, n_calls=2, wait=4.0, replica_penalty=0.0)
    assert not is_worth_opening(spare, n_open=1, n_calls=2, wait=4.0, replica_penalty=3.0)


def test_leases_and_calls_on_the_way_count_as_taken_units() -> None:
    engine = candidate("a", max_running=2, queue_seconds=60.0)
    assert why_not(CALL, engine, ttft=5.0, n_reused_tokens=0) is None
    engine.load.n_leased, engine.load.n_calls = 1, 1
    assert "admission units" in (why_not(CALL, engine, ttft=5.0, n_reused_tokens=0) or "")


def test_a_call_that_can_never_fit_is_not_sent() -> None:
    small = candidate("a", kv_capacity_tokens=64, kv_free_tokens=64)
    assert "64 tokens" in (why_not(CALL, small, ttft=5.0, n_reused_tokens=0) or "")


@pytest.mark.parametrize(
    ("there", "held", "excluded", "expected"),
    [
        (candidate("a"), {}, (), None),
        (candidate("a"), holding("a"), (), None),
        (candidate("a"), holding("a", Tier.HOST), (), None),
        (None, {}, (), Discard.EPOCH),
        (candidate("a", epoch=Epoch(2)), {}, (), Discard.EPOCH),
        (candidate("a"), holding("a", Tier.MISSING), (), Discard.MISSING),
        (candidate("a", is_draining=True), {}, (), Discard.DRAINING),
        (candidate("a", state=EngineState.PARKED), {}, (), Discard.NOT_OPEN),
        (candidate("a"), {}, ((name("a"), Epoch(1)),), Discard.EXCLUDED),
    ],
)
def test_a_lease_is_honoured_while_its_engine_run_lives_and_holds_the_prefix(
    there: Candidate | None,
    held: dict[NamespacedName, SessionView],
    excluded: Sequence[tuple[NamespacedName, Epoch]],
    expected: Discard | None,
) -> None:
    assert judge_lease(PUBLISHED, there, held, excluded) is expected


def test_a_lease_is_trusted_before_telemetry_has_heard_of_its_turn() -> None:
    there, missing = candidate("a"), holding("a", Tier.MISSING)
    own = PUBLISHED._replace(is_published=False)
    unreported = {instance: view._replace(is_reported=False) for instance, view in missing.items()}
    for lease, held in ((own, missing), (PUBLISHED, unreported)):
        assert judge_lease(lease, there, held, ()) is None
        assert honour(lease, CALL, there, held, NOW).tier is Tier.DEVICE
    assert judge_lease(own, candidate("a", epoch=Epoch(2)), missing, ()) is Discard.EPOCH


turns = st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=12)


@given(turns, st.data())
def test_two_routers_give_every_turn_of_a_conversation_the_same_session(messages: list[bytes], data: st.DataObject) -> None:
    """Each call is a longer prefix of one conversation; whichever router serves it, telemetry has told both the keys so far."""
    published: set[SessionKey] = set()
    own = (OwnSessions(), OwnSessions())
    keys = []
    for n in sorted(data.draw(st.sets(st.integers(1, len(messages)), min_size=1))):
        router = own[data.draw(st.integers(0, 1))]
        chain = message_chain(model="m", tenant="t", messages=messages[:n])
        key = continued_session(chain, lambda k, r=router: r.knows("t", k) or k in published)  # type: ignore[misc]
        router.remember("t", key)
        published.add(key)
        keys.append(key)
    assert len(set(keys)) == 1


@given(turns, turns)
def test_a_conversation_of_another_tenant_or_model_is_another_session(messages: list[bytes], others: list[bytes]) -> None:
    known = {inferred_session_key(message_chain(model="m", tenant="t", messages=messages)[-1])}
    for model, tenant in (("m", "u"), ("n", "t")):
        chain = message_chain(model=model, tenant=tenant, messages=[*messages, *others])
        assert continued_session(chain, known.__contains__) not in known


@given(st.lists(st.tuples(st.sampled_from("tuvw"), st.integers(0, 30)), max_size=60))
def test_own_sessions_stay_bounded(seen: list[tuple[str, int]]) -> None:
    own = OwnSessions(max_per_tenant=3, max_tenants=2)
    for tenant, key in seen:
        own.remember(tenant, SessionKey(str(key)))
        assert own.knows(tenant, SessionKey(str(key)))
        own.check_integrity()


def test_session_ids_are_found_in_the_order_of_the_conventions() -> None:
    headers = {b"x-session-id": b"two", b"x-smg-routing-key": b"last"}
    body = {"session_id": "body", "metadata": {"user_id": "user"}, "prompt_cache_key": "cache"}
    assert given_session_id(headers | {b"x-aerostat-session-id": b"one"}, body) == "one"
    assert given_session_id(headers, body) == "two"
    assert given_session_id({b"session_id": b"codex"}, body) == "codex"
    assert given_session_id({}, body) == "body"
    assert given_session_id({}, {"metadata": {"user_id": "user"}}) == "user"
    assert given_session_id({}, {"prompt_cache_key": "cache"}) == "cache"
    assert given_session_id({}, {"metadata": "odd"}) is None
    with pytest.raises(SessionIdError, match="at most 256 bytes"):
        given_session_id({b"x-session-id": b"x" * 257}, {})


def test_a_tenant_is_a_hash_and_the_same_key_is_the_same_tenant() -> None:
    assert tenant_of({}) == "default"
    assert tenant_of({b"authorization": b"Bearer k"}) == tenant_of({b"x-api-key": b"k"})
    assert "k-secret" not in tenant_of({b"x-api-key": b"k-secret"})
    assert is_final({b"x-dynamo-session-final": b"True"})
    assert not is_final({b"x-aerostat-session-final": b"no"})


@given(st.sets(st.sampled_from("abcdefgh"), min_size=2))
def test_losing_an_instance_leaves_the_wake_order_of_the_others(instances: set[str]) -> None:
    order = wake_order(MODEL, map(name, instances))
    for gone in order:
        assert wake_order(MODEL, [i for i in order if i != gone]) == tuple(i for i in order if i != gone)


@given(st.lists(st.tuples(st.floats(0, 3), st.sampled_from(Sight)), max_size=40))
def test_demand_is_what_was_seen_in_the_window(seen: list[tuple[float, Sight]]) -> None:
    window, now, times = DemandWindow(10.0), 0.0, []
    for passed, sight in seen:
        now += passed
        window.note(MODEL, sight, now)
        times.append((now, sight))
    arrivals = [at for at, sight in times if sight is Sight.ARRIVAL]
    told = sum(d.arrivals for d in window.report(now))
    assert sum(at > now - 9 for at in arrivals) <= told <= sum(at > now - 10 for at in arrivals)
    assert window.arrivals(MODEL, now) == told
    assert window.report(now + 11) == ()


def test_demand_counts_each_kind() -> None:
    window = DemandWindow()
    for sight in (Sight.ARRIVAL, Sight.ARRIVAL, Sight.HELD, Sight.SPILLED):
        window.note(MODEL, sight, 1.0)
    assert window.report(1.0) == (Demand(model=MODEL, arrivals=2, held=1, spilled=1),)


def test_estimates_follow_what_engines_count() -> None:
    estimates = TokenEstimates()
    assert estimates.n_prompt(MODEL, 400) == 100
    for _ in range(50):
        estimates.observe(MODEL, n_bytes=800, n_prompt=100, n_output=10)
    assert estimates.n_prompt(MODEL, 800) == 100
    assert 10 <= estimates.n_output(MODEL, None) <= 11
    assert estimates.n_output(MODEL, 3) == 3
    estimates.keep_only(set())
    assert estimates.n_prompt(MODEL, 400) == 100


def test_overload_policies() -> None:
    spill = Overload(policy=OverloadPolicy.SPILL, spill_to=ModelName("o"))
    assert on_overload(spill, is_running=True, can_spill=True).spill_to == "o"
    assert on_overload(spill, is_running=True, can_spill=False).shedding is Shedding.HOLD
    reject = Overload(policy=OverloadPolicy.REJECT)
    assert on_overload(reject, is_running=True, can_spill=False).shedding is Shedding.REJECT
    assert on_overload(reject, is_running=False, can_spill=False).shedding is Shedding.HOLD
    assert on_overload(Overload(), is_running=True, can_spill=True).shedding is Shedding.HOLD


def test_a_session_s_span_is_from_its_first_call_to_its_last_and_is_told_once() -> None:
    spans = SessionSpans(limit=2)
    for now, session in enumerate("aabca"):
        spans.note(SessionKey(session), float(now))
    assert len(spans) == 2
    assert spans.end(SessionKey("b"), 9.0) is None, "forgotten: it began before the others that are here"
    assert spans.end(SessionKey("c"), 9.0) == 6.0
    assert spans.end(SessionKey("c"), 9.0) is None
