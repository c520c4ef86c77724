"""Placement against brute force, and the invariants of its decisions over time."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aerostat_core.ids import InstanceName, ModelName, NodeName
from aerostat_core.specs import DemandDefinition, PoolMode, Sharing
from aerostat_operator.policy.kvpr import Board, Claim, Rules, Seat
from aerostat_operator.policy.placement import Held, Move, Placements, Wish, place

pytestmark = pytest.mark.cpu
MI = 2**20


def seat(name: str, capacity_mi: int = 1024, *, node: str = "n1", accepting: bool = True) -> Seat:
    return Seat(instance=InstanceName(name), node=NodeName(node), capacity_bytes=capacity_mi * MI, accepting=accepting)


def claim(name: str, *, weights_mi: int = 0, kv_mi: int = 0, demand: float = 0.0, reserve_mi: int = 0) -> Claim:
    return Claim(
        model=ModelName(name),
        demand=demand,
        weights_bytes=weights_mi * MI,
        kv_floor_bytes=kv_mi * MI,
        reserve_bytes=reserve_mi * MI,
        master_bytes=weights_mi * MI,
    )


def wish(of: Claim, *, replicas: int = 1, entitled: int | None = None, on: Sequence[str] = (), ready: bool = True) -> Wish:
    held = tuple(Held(instance=InstanceName(i), ready=ready) for i in on)
    return Wish(claim=of, replicas=replicas, entitled=replicas if entitled is None else entitled, held=held)


def seated(placements: Placements, model: str) -> tuple[str, ...]:
    return placements.seats[ModelName(model)]


# -------------------------------------------------------------------- single decisions


def test_the_seat_with_the_least_resulting_pressure_is_taken() -> None:
    seats = [seat("a", 1000), seat("b", 400)]
    wishes = [wish(claim("busy", weights_mi=100, demand=9.0), on=["a"]), wish(claim("new", weights_mi=100, demand=1.0))]
    assert seated(place(seats, wishes, Rules(max_moves=0)), "new") == ("b",)


def test_models_without_demand_are_spread_by_bytes() -> None:
    seats = [seat("a"), seat("b")]
    placements = place(seats, [wish(claim(f"m{i}", weights_mi=100 + i)) for i in range(4)], Rules())
    assert sorted(len([m for m, at in placements.seats.items() if at == (i,)]) for i in ("a", "b")) == [2, 2]


def test_an_infeasible_model_is_told_what_it_asks_and_what_is_there() -> None:
    wishes = [wish(claim("there", weights_mi=424), on=["cpu-pool-node1-0"]), wish(claim("big", weights_mi=270, kv_mi=512))]
    placements = place([seat("cpu-pool-node1-0")], wishes, Rules())
    assert seated(placements, "big") == ()
    missing = placements.missing[ModelName("big")]
    assert missing.reason == "InsufficientMemory"
    assert missing.message == "weights 270Mi + KV 512Mi + reserve 0 = 782Mi per device, 600Mi of 1Gi are free on cpu-pool-node1-0"


def test_more_replicas_than_instances_are_named_as_such() -> None:
    placements = place([seat("a")], [wish(claim("m"), replicas=2)], Rules())
    assert seated(placements, "m") == ("a",)
    assert placements.missing[ModelName("m")].reason == "NotEnoughInstances"
    assert placements.missing[ModelName("m")].message.startswith("1 of 2 replicas are placed")


def test_a_pool_that_accepts_nothing_says_so() -> None:
    placements = place([seat("a", accepting=False)], [wish(claim("m"))], Rules())
    assert placements.missing[ModelName("m")].reason == "NoInstances"


def test_replicas_prefer_distinct_nodes() -> None:
    seats = [seat("a0", node="a"), seat("a1", node="a"), seat("b0", node="b")]
    assert seated(place(seats, [wish(claim("m", weights_mi=10), replicas=2)], Rules()), "m") == ("a0", "b0")


def test_every_model_gets_its_first_replica_before_any_gets_its_second() -> None:
    wishes = [wish(claim("hungry", weights_mi=600, demand=5.0), replicas=2), wish(claim("small", weights_mi=600))]
    placements = place([seat("a"), seat("b")], wishes, Rules())
    assert len(seated(placements, "small")) == 1
    assert len(seated(placements, "hungry")) == 1


def test_a_hot_instance_is_pinned_to_one_model() -> None:
    placements = place([seat("a"), seat("b")], [wish(claim(f"m{i}", weights_mi=1)) for i in range(3)], Rules(mode=PoolMode.HOT))
    assert sorted(at for at in placements.seats.values() if at) == [("a",), ("b",)]
    assert "is pinned to" in next(iter(placements.missing.values())).message


def test_request_rate_ranks_by_demand_over_weights() -> None:
    """One seat is left: TokenRate gives it to the larger demand, RequestRate to the larger demand per byte."""
    wishes = [wish(claim("heavy", weights_mi=800, demand=5.0)), wish(claim("light", weights_mi=300, demand=4.0))]
    by_tokens = place([seat("a")], wishes, Rules())
    by_requests = place([seat("a")], wishes, Rules(demand=DemandDefinition.REQUEST_RATE))
    assert seated(by_tokens, "heavy") == ("a",)
    assert seated(by_requests, "light") == ("a",)


def test_in_rounds_weights_may_exceed_the_device_together() -> None:
    rules = Rules(sharing=Sharing.ROUNDS, staging_bytes=100 * MI)
    wishes = [wish(claim(f"m{i}", weights_mi=800, kv_mi=10)) for i in range(3)]
    placements = place([seat("a")], wishes, rules)
    assert placements.missing == {}
    assert place([seat("a", 920)], wishes, rules).missing != {}


def test_in_rounds_decode_shares_must_leave_time() -> None:
    shares = [replace(claim(f"m{i}"), decode_share=1 / 3) for i in range(3)]
    placements = place([seat("a")], [wish(c) for c in shares], Rules(sharing=Sharing.ROUNDS))
    assert "decode of all models would take 1.00" in placements.missing[ModelName("m2")].message


def test_in_rounds_masters_must_fit_the_nodes_host_memory() -> None:
    rules = Rules(sharing=Sharing.ROUNDS, host_bytes=1000 * MI)
    wishes = [wish(claim("x", weights_mi=600), replicas=2), wish(claim("y", weights_mi=600))]
    placements = place([seat("a"), seat("b")], wishes, rules)
    assert seated(placements, "x") == ("a", "b")  # one master serves both
    assert "600Mi of host memory, 400Mi are free on n1" in placements.missing[ModelName("y")].message


# -------------------------------------------------------------------- moves


def test_a_move_keeps_its_source_until_the_target_is_ready() -> None:
    seats = [seat("a"), seat("b")]
    busy = [claim("x", weights_mi=100, demand=5.0), claim("y", weights_mi=100, demand=5.0)]
    first = place(seats, [wish(c, on=["a"]) for c in busy], Rules())
    assert first.moves == (Move(model=ModelName("x"), source=InstanceName("a"), target=InstanceName("b")),)
    assert seated(first, "x") == ("a", "b")

    starting = Wish(
        claim=busy[0], replicas=1, entitled=1, held=(Held(instance=InstanceName("a"), ready=True), Held(instance=InstanceName("b")))
    )
    second = place(seats, [starting, wish(busy[1], on=["a"])], Rules(), moves=first.moves)
    assert seated(second, "x") == ("a", "b")
    assert second.moves == first.moves

    third = place(seats, [wish(busy[0], on=["a", "b"]), wish(busy[1], on=["a"])], Rules(), moves=second.moves)
    assert seated(third, "x") == ("b",)
    assert third.moves == ()


def test_a_move_that_failed_is_not_tried_again() -> None:
    seats = [seat("a"), seat("b")]
    x, y = claim("x", weights_mi=100, demand=5.0), claim("y", weights_mi=100, demand=5.0)
    move = Move(model=ModelName("x"), source=InstanceName("a"), target=InstanceName("b"))
    held = (Held(instance=InstanceName("a"), ready=True), Held(instance=InstanceName("b"), failed=True))
    placements = place(seats, [Wish(claim=x, replicas=1, entitled=1, held=held), wish(y, on=["a"])], Rules(), moves=[move])
    assert seated(placements, "x") == ("a",)
    assert placements.failed_moves == {("x", "b")}
    assert [m.model for m in placements.moves] == ["y"]


def test_a_gain_within_the_hysteresis_moves_nothing() -> None:
    seats = [seat("a"), seat("b")]
    wishes = [wish(claim("x", demand=5.0), on=["a"]), wish(claim("y", demand=0.4), on=["a"]), wish(claim("z", demand=4.6), on=["b"])]
    assert place(seats, wishes, Rules(hysteresis=0.10)).moves == ()
    assert place(seats, wishes, Rules(hysteresis=0.01)).moves != ()


def test_a_model_on_a_cordoned_node_stays_listed_until_its_replacement_is_ready() -> None:
    seats = [seat("a", accepting=False), seat("b", node="n2")]
    m = claim("m", weights_mi=10)
    first = place(seats, [wish(m, on=["a"])], Rules())
    assert seated(first, "m") == ("a", "b")
    assert first.moves == ()
    assert seated(place(seats, [wish(m, on=["a", "b"])], Rules()), "m") == ("b",)


def test_what_turns_out_too_large_leaves_and_what_serves_stays() -> None:
    grown = Wish(claim=claim("grown", weights_mi=900), replicas=1, entitled=1, held=(Held(instance=InstanceName("a")),))
    placements = place([seat("a")], [grown, wish(claim("served", weights_mi=300), on=["a"])], Rules())
    assert seated(placements, "served") == ("a",)
    assert seated(placements, "grown") == ()
    assert "grown leaves a" in placements.reasons[0]


def test_others_move_to_make_room_and_the_model_follows() -> None:
    """x and y sit apart, z needs a whole device: y joins x first, then z takes its place."""
    seats = [seat("a"), seat("b")]
    x, y, z = claim("x", weights_mi=400), claim("y", weights_mi=400), claim("z", weights_mi=900)
    first = place(seats, [wish(x, on=["a"]), wish(y, on=["b"]), wish(z)], Rules())
    assert len(first.moves) == 1
    assert seated(first, "z") == ()
    assert "moves from" in first.missing[ModelName("z")].message

    moving = first.moves[0]
    on = {"x": ["a"], "y": ["b"]} | {moving.model: [moving.source, moving.target]}
    second = place(seats, [wish(x, on=on["x"]), wish(y, on=on["y"]), wish(z)], Rules(), moves=first.moves)
    assert seated(second, "z") == (moving.source,)
    assert second.missing == {}


def test_fewer_replicas_drop_what_failed_first() -> None:
    held = (Held(instance=InstanceName("a"), ready=True), Held(instance=InstanceName("b"), failed=True))
    placements = place([seat("a"), seat("b")], [Wish(claim=claim("m"), replicas=1, entitled=1, held=held)], Rules())
    assert seated(placements, "m") == ("a",)


# -------------------------------------------------------------------- against brute force


@dataclass(frozen=True)
class Case:
    seats: tuple[Seat, ...]
    claims: tuple[Claim, ...]
    rules: Rules


def all_seatings(case: Case) -> Iterator[Board]:
    for choice in itertools.product(case.seats, repeat=len(case.claims)):
        board = Board(case.rules, case.seats)
        for c, s in zip(case.claims, choice, strict=True):
            if not board.fits(c, s.instance):
                break
            board.put(c, s.instance)
        else:
            yield board


def board_of(case: Case, placements: Placements) -> Board:
    board = Board(case.rules, case.seats)
    for c in case.claims:
        for instance in placements.seats[c.model]:
            board.put(c, instance)
    return board


@st.composite
def cases(draw: st.DrawFn, *, tight: bool) -> Case:
    n_seats = draw(st.integers(1, 3))
    capacity = 100
    seats = tuple(seat(f"i{k}", capacity, node=f"n{k % 2}") for k in range(n_seats))
    weights = st.integers(5, 70) if tight else st.integers(1, 20)
    demands = st.one_of(st.just(0.0), st.floats(0.1, 100.0))
    claims = tuple(
        claim(f"m{i}", weights_mi=draw(weights), kv_mi=draw(st.integers(0, 20)) if tight else 0, demand=draw(demands))
        for i in range(draw(st.integers(1, 5)))
    )
    sharing = draw(st.sampled_from(Sharing)) if tight else Sharing.CONCURRENT
    return Case(seats=seats, claims=claims, rules=Rules(sharing=sharing, demand=draw(st.sampled_from(DemandDefinition))))


@settings(max_examples=150, deadline=None)
@given(cases(tight=True))
def test_a_feasible_case_is_found(case: Case) -> None:
    placements = place(case.seats, [wish(c) for c in case.claims], case.rules)
    feasible = next(all_seatings(case), None) is not None
    assert (placements.missing == {}) is feasible
    assert all(len(at) == 1 for model, at in placements.seats.items() if model not in placements.missing)


@settings(max_examples=150, deadline=None)
@given(cases(tight=False))
def test_pressure_stays_within_the_papers_bound_of_the_optimum(case: Case) -> None:
    """KVPRmax <= OPT * (1 + C / (S_gmax - w_k)), seed 003: k the model placed last on the most pressed group.

    S_gmax - w_k is what that group has left to KV in the end.
    """
    placements = place(case.seats, [wish(c) for c in case.claims], case.rules)
    board = board_of(case, placements)
    optimum = min(b.max_pressure() for b in all_seatings(case))
    hottest = max(case.seats, key=lambda s: board.pressure(s.instance))
    left = case.rules.kv_room(hottest.capacity_bytes, board.at(hottest.instance))
    assume(left > 0)
    assert board.max_pressure() <= optimum * (1 + hottest.capacity_bytes / left) * (1 + 1e-9)


# -------------------------------------------------------------------- over time


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Seat], list[Wish], Rules]:
    seats = [
        seat(f"i{k}", draw(st.sampled_from([100, 150])), node=f"n{k % 2}", accepting=draw(st.booleans()) or k == 0)
        for k in range(draw(st.integers(1, 4)))
    ]
    names = [s.instance for s in seats]
    wishes = []
    for i in range(draw(st.integers(0, 5))):
        replicas = draw(st.integers(0, 3))
        held = draw(st.lists(st.sampled_from(names), unique=True, max_size=2))
        of = claim(
            f"m{i}",
            weights_mi=draw(st.integers(1, 90)),
            kv_mi=draw(st.integers(0, 20)),
            demand=draw(st.sampled_from([0.0, 1.0, 3.5, 40.0])),
        )
        states = [Held(instance=h, ready=draw(st.booleans()), failed=draw(st.booleans())) for h in held]
        states = [replace(h, failed=h.failed and not h.ready) for h in states]
        wishes.append(
            Wish(
                claim=of,
                replicas=replicas,
                entitled=draw(st.integers(0, replicas)),
                created_at=str(draw(st.integers(0, 2))),
                held=tuple(states),
            )
        )
    mode = draw(st.sampled_from(PoolMode))
    sharing = Sharing.CONCURRENT if mode is PoolMode.HOT else draw(st.sampled_from(Sharing))
    return seats, wishes, Rules(sharing=sharing, mode=mode, max_moves=draw(st.integers(0, 2)))


def check(seats: Sequence[Seat], wishes: Sequence[Wish], rules: Rules, placements: Placements) -> None:
    board = Board(rules, tuple(seats))
    by_name = {s.instance: s for s in seats}
    for w in wishes:
        at = placements.seats[w.model]
        assert len(at) == len(set(at))
        live = [i for i in at if by_name[i].accepting]
        n_moves = sum(m.model == w.model for m in placements.moves)
        assert len(live) - n_moves <= w.replicas
        assert (len(live) - n_moves < w.replicas) is (w.model in placements.missing)
        for instance in live:
            board.put(w.claim, instance)
    board.check_integrity()
    assert len(placements.moves) <= rules.max_moves


@settings(max_examples=200, deadline=None)
@given(pools(), st.randoms(use_true_random=False))
def test_a_decision_keeps_its_promises_and_does_not_depend_on_order(pool: tuple[list[Seat], list[Wish], Rules], random: object) -> None:
    seats, wishes, rules = pool
    placements = place(seats, wishes, rules)
    check(seats, wishes, rules, placements)
    shuffled_seats, shuffled_wishes = list(seats), list(wishes)
    random.shuffle(shuffled_seats)  # type: ignore[attr-defined]
    random.shuffle(shuffled_wishes)  # type: ignore[attr-defined]
    assert place(shuffled_seats, shuffled_wishes, rules) == placements


@settings(max_examples=150, deadline=None)
@given(pools())
def test_a_world_that_follows_the_plan_comes_to_rest(pool: tuple[list[Seat], list[Wish], Rules]) -> None:
    """All that is placed becomes ready: after a few decisions nothing changes any more, and only then no move is under way."""
    seats, wishes, rules = pool
    placements = place(seats, wishes, rules)
    for _ in range(30):
        wishes = [replace(w, held=tuple(Held(instance=i, ready=True) for i in placements.seats[w.model])) for w in wishes]
        following = place(seats, wishes, rules, moves=placements.moves, failed_moves=placements.failed_moves)
        check(seats, wishes, rules, following)
        if following.seats == placements.seats and following.moves == placements.moves:
            assert following.moves == ()
            return
        placements = following
    raise AssertionError(f"still changing: {placements}")


def test_a_large_pool_is_placed_in_time_that_nobody_notices() -> None:
    seats = [seat(f"i{k:02}", 80_000, node=f"n{k // 8}") for k in range(48)]
    wishes = [wish(claim(f"m{i:03}", weights_mi=2_000 + 137 * (i % 90), kv_mi=512, demand=float(i % 17))) for i in range(200)]
    placements = place(seats, wishes, Rules())
    assert placements.missing == {}
    pressures: Mapping[InstanceName, float] = placements.pressure
    assert max(pressures.values()) <= 1.2 * sum(pressures.values()) / len(pressures)
