"""Which models live on which instances of one pool: greedy by KVPR, sticky, with a repack where greedy finds no room.

A decision starts from what is there. A replica stays where it is unless its instance cannot have it, and a move keeps
its source until its target is ready. In order: keep, settle the moves under way, place what is missing, spread what was
just placed, and, if all are placed, move at most `max_moves` whose gain exceeds the hysteresis.
Tensor-parallel anti-affinity (Prism) holds by construction: an instance is a group of distinct devices, and replicas of
one model sit on distinct instances.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isinf

from aerostat_core.ids import InstanceName, ModelName
from aerostat_core.quantities import format_size
from aerostat_core.specs import DemandDefinition
from aerostat_operator.policy.kvpr import Board, Claim, Rules, Seat
from aerostat_operator.policy.repack import Search, Seating


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A replica that the instance's spec lists already. `ready`: it can take over traffic from another one."""

    instance: InstanceName
    ready: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A model that wants `replicas`; for the first `entitled` of them (minReplicas) others are moved if need be."""

    claim: Claim
    replicas: int
    entitled: int
    created_at: str = ""
    held: tuple[Held, ...] = ()

    @property
    def model(self) -> ModelName:
        return self.claim.model


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Move:
    model: ModelName
    source: InstanceName
    target: InstanceName


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Why a model has fewer replicas than it wants. `reason` is CamelCase, as in a condition.

    Not entitled: only demand asks for the missing replica, so nothing is wrong.
    """

    reason: str
    message: str
    entitled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """`seats` is what the instances' specs shall list, sources of moves included. `failed_moves` are not tried again."""

    seats: dict[ModelName, tuple[InstanceName, ...]]
    missing: dict[ModelName, Missing]
    moves: tuple[Move, ...] = ()
    failed_moves: frozenset[tuple[ModelName, InstanceName]] = frozenset()
    reasons: tuple[str, ...] = ()
    pressure: dict[InstanceName, float] = field(default_factory=dict)


def place(
    seats: Sequence[Seat],
    wishes: Sequence[Wish],
    rules: Rules,
    *,
    moves: Sequence[Move] = (),
    failed_moves: frozenset[tuple[ModelName, InstanceName]] = frozenset(),
) -> Placements:
    """`moves` and `failed_moves` are those of the previous decision. The order of seats and wishes does not matter."""
    work = _Placing(Board(rules, tuple(seats)), {w.model: w for w in sorted(wishes, key=lambda w: (w.created_at, w.model))})
    work.failed_moves = set(failed_moves)
    work.keep()
    work.settle_moves(sorted(moves))
    work.trim()
    work.fill()
    work.spread()
    work.rebalance()
    return work.result()


@dataclass(slots=True)
class _Placing:
    board: Board
    wishes: dict[ModelName, Wish]  # older models first
    moves: list[Move] = field(default_factory=list)
    failed_moves: set[tuple[ModelName, InstanceName]] = field(default_factory=set)
    fresh: Seating = field(default_factory=list)  # placed by this decision, runs nowhere: free to rearrange
    missing: dict[ModelName, Missing] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    search: Search = field(init=False)

    def __post_init__(self) -> None:
        self.search = Search(self.board)

    # ---------------------------------------------------------------- what is there

    def keep(self) -> None:
        """What serves stays before what does not yet, the older model before the younger."""
        for ready in (True, False):
            for wish in self.wishes.values():
                for held in sorted(wish.held, key=lambda h: h.instance):
                    if held.ready is not ready or not self._accepts(held.instance):
                        continue
                    if obstacle := self.board.obstacle(wish.claim, held.instance):
                        self.reasons.append(f"{wish.model} leaves {held.instance}: {obstacle}")
                    else:
                        self.board.put(wish.claim, held.instance)

    def settle_moves(self, moves: Sequence[Move]) -> None:
        """A ready target ends its source; a failed target ends itself and is not tried again; the rest goes on."""
        for move in moves:
            wish = self.wishes.get(move.model)
            live = self.board.seats_of(move.model)
            if wish is None or move.source not in live or move.target not in live:
                continue
            target = self._held(wish, move.target)
            if target.failed:
                self.failed_moves.add((move.model, move.target))
                self._drop(wish, move.target, f"it failed there; {move.source} goes on")
            elif target.ready:
                self._drop(wish, move.source, f"{move.target} took over")
            else:
                self.moves.append(move)

    def trim(self) -> None:
        """Fewer replicas wanted than there are: failed ones go first, then those not ready, then the one that relieves most."""
        for wish in self.wishes.values():
            while self._n_placed(wish.model) > wish.replicas:
                live = self.board.seats_of(wish.model)
                ends = {end for m in self.moves if m.model == wish.model for end in (m.source, m.target)}
                options = [i for i in live if i not in ends] or live
                self._drop(wish, min(options, key=lambda i: self._drop_order(wish, i)), f"{wish.replicas} replicas are wanted")

    def _drop_order(self, wish: Wish, instance: InstanceName) -> tuple[bool, bool, float, str]:
        held = self._held(wish, instance)
        self.board.take(wish.claim, instance)
        left = self.board.max_pressure()
        self.board.put(wish.claim, instance)
        return not held.failed, held.ready, left, instance

    # ---------------------------------------------------------------- what is missing

    def fill(self) -> None:
        """Every model's first replica before any model's second; what is entitled before what demand asks for."""
        ranked = sorted(self.wishes.values(), key=self._rank)
        for entitled in (True, False):
            for nth in range(max((w.replicas for w in ranked), default=0)):
                for wish in ranked:
                    n_live = self._n_placed(wish.model)
                    if (nth < wish.entitled) is entitled and n_live <= nth < wish.replicas and wish.model not in self.missing:
                        self._place_one(wish, entitled)

    def _rank(self, wish: Wish) -> tuple[float, int, str]:
        claim = wish.claim
        by_weight = self.board.rules.demand is DemandDefinition.REQUEST_RATE
        demand = claim.demand / max(claim.weights_bytes, 1) if by_weight else claim.demand
        return -demand, -claim.fixed_bytes, claim.model

    def _place_one(self, wish: Wish, entitled: bool) -> None:
        options = [s.instance for s in self.board.seats if self.board.fits(wish.claim, s.instance)]
        if options:
            self._seat(wish.claim, min(options, key=lambda i: self._seat_order(wish.claim, i)))
        elif not (entitled and self._repack(wish)):
            self.missing.setdefault(wish.model, self._explain(wish))

    def _seat(self, claim: Claim, instance: InstanceName) -> None:
        self.board.put(claim, instance)
        self.fresh.append((claim, instance))

    def _seat_order(self, claim: Claim, instance: InstanceName) -> tuple[float, bool, float, str]:
        """Least resulting KVPR, then another node than the other replicas', then the emptiest (a cold start has no demand)."""
        seat = self.board.seat(instance)
        beside = any(self.board.seat(i).node == seat.node for i in self.board.seats_of(claim.model))
        free = self.board.free_bytes(instance, claim) / max(seat.capacity_bytes, 1)
        return self.board.pressure(instance, claim), beside, -free, instance

    def _repack(self, wish: Wish) -> bool:
        """Rearrange what runs nowhere yet; if that is not enough, start moves. True once the model has its seat."""
        n_placed, fresh, self.fresh = self._n_placed(wish.model), self.fresh, []
        for claim, instance in fresh:
            self.board.take(claim, instance)
        movable = self._movable() if self._moves_left() > 0 else []
        found = self.search.pack([*(claim for claim, _ in fresh), wish.claim], movable)
        for claim, instance in fresh if found is None else self._start_moves(found, {claim.model: source for claim, source in movable}):
            if self.board.fits(claim, instance):
                self._seat(claim, instance)
        lost = Counter(claim.model for claim, _ in fresh) - Counter(claim.model for claim, _ in self.fresh)
        self.missing |= {model: self._explain(self.wishes[model]) for model in sorted(lost)}
        return self._n_placed(wish.model) > n_placed

    def _start_moves(self, found: Seating, homes: dict[ModelName, InstanceName]) -> Seating:
        """Start those moves of `found` whose target has room beside all sources. Returns the seats of the others."""
        for claim, target in found:
            source = homes.get(claim.model, target)
            if source != target and self._moves_left() > 0 and self.board.fits(claim, target):
                self.board.put(claim, target)
                self.moves.append(Move(model=claim.model, source=source, target=target))
                self.reasons.append(f"{claim.model} moves from {source} to {target} to make room")
        return [(claim, instance) for claim, instance in found if claim.model not in homes]

    def _movable(self) -> Seating:
        """Ready replicas of models that have one and no move under way: where others are, they limit where it may go."""
        return [
            (wish.claim, live[0])
            for wish in self.wishes.values()
            if len(live := self.board.seats_of(wish.model)) == 1 and self._held(wish, live[0]).ready
        ]

    def _explain(self, wish: Wish) -> Missing:
        n_placed = self._n_placed(wish.model)
        count = f"{n_placed} of {wish.replicas} replicas are placed: " if wish.replicas > 1 else ""
        entitled = n_placed < wish.entitled
        accepting = [s.instance for s in self.board.seats if s.accepting]
        without = [i for i in accepting if i not in self.board.seats_of(wish.model)]
        if not accepting:
            why = "the pool has no instance that accepts models: its own conditions say why"
            return Missing(reason="NoInstances", message=count + why, entitled=entitled)
        if not without:
            why = "each of the pool's instances has a replica already"
            return Missing(reason="NotEnoughInstances", message=count + why, entitled=entitled)
        best = min(without, key=lambda i: (-self.board.free_bytes(i), i))
        why = self.board.obstacle(wish.claim, best) or "its seat was given to make room; it is placed next"
        waits = [f"{m.model} moves from {m.source} to {m.target}" for m in self.moves]
        return Missing(reason="InsufficientMemory", message="; ".join([count + why, *waits]), entitled=entitled)

    # ---------------------------------------------------------------- better seats

    def spread(self) -> None:
        """Relocate or swap what was just placed while that relieves the most pressed instance. It costs nothing yet."""
        for _ in range(8 * len(self.fresh)):
            hottest = max((s.instance for s in self.board.seats), key=lambda i: (self.board.pressure(i), i))
            if not any(self._relieve(claim, i) for claim, i in list(self.fresh) if i == hottest):
                return

    def _relieve(self, claim: Claim, source: InstanceName) -> bool:
        for target in sorted((s.instance for s in self.board.seats if s.instance != source), key=lambda i: (self.board.pressure(i), i)):
            swaps = [c for c, i in self.fresh if i == target and c.model != claim.model]
            if any(self._exchange(claim, source, other, target) for other in (None, *swaps)):
                return True
        return False

    def _exchange(self, claim: Claim, source: InstanceName, other: Claim | None, target: InstanceName) -> bool:
        """`claim` to target and `other` to source, if both have room and it lowers the higher pressure of the two."""
        board, before = self.board, self.board.pressure(source)
        seats = {claim.model: (claim, source, target)} | ({other.model: (other, target, source)} if other else {})
        for c, old, _ in seats.values():
            board.take(c, old)
        if all(board.fits(c, new) for c, _, new in seats.values()):
            for c, _, new in seats.values():
                board.put(c, new)
            if max(board.pressure(source), board.pressure(target)) < before * (1 - 1e-9):
                moved = {(c.model, old): new for c, old, new in seats.values()}
                self.fresh = [(c, moved.get((c.model, i), i)) for c, i in self.fresh]
                return True
            for c, _, new in seats.values():
                board.take(c, new)
        for c, old, _ in seats.values():
            board.put(c, old)
        return False

    def rebalance(self) -> None:
        """Move what is ready off the most pressed instance, where the gain in the pool's highest KVPR exceeds the hysteresis."""
        while not any(m.entitled for m in self.missing.values()) and self._moves_left() > 0 and self.board.seats:
            before = self.board.max_pressure()
            hottest = max((s.instance for s in self.board.seats), key=lambda i: (self.board.pressure(i), i))
            options = [
                (self._pressure_after(claim, hottest, s.instance), claim.model, s.instance)
                for claim in self.board.at(hottest)
                if self._held(self.wishes[claim.model], hottest).ready and all(m.model != claim.model for m in self.moves)
                for s in self.board.seats
                if (claim.model, s.instance) not in self.failed_moves and self.board.fits(claim, s.instance)
            ]
            if not options:
                return
            after, model, target = min(options)
            if not (isinf(before) and not isinf(after)) and not before - after > self.board.rules.hysteresis * before:
                return
            self.board.put(self.wishes[model].claim, target)
            self.moves.append(Move(model=model, source=hottest, target=target))
            self.reasons.append(f"{model} moves from {hottest} to {target}: the highest KVPR falls from {before:.4g} to {after:.4g}")

    def _pressure_after(self, claim: Claim, source: InstanceName, target: InstanceName) -> float:
        self.board.take(claim, source)
        self.board.put(claim, target)
        after = self.board.max_pressure()
        self.board.take(claim, target)
        self.board.put(claim, source)
        return after

    # ---------------------------------------------------------------- helpers

    def result(self) -> Placements:
        seats = {}
        for wish in self.wishes.values():
            live = self.board.seats_of(wish.model)
            n_ready = sum(self._held(wish, i).ready for i in live)
            # A replica on a cordoned or lost node stays listed until enough others are ready.
            lame = [h.instance for h in wish.held if h.instance in self.board and not self.board.seat(h.instance).accepting]
            kept = lame if n_ready < wish.replicas else []
            seats[wish.model] = tuple(sorted({*live, *kept}))
        for claim, instance in self.fresh:
            outcome = f"KVPR {self.board.pressure(instance):.4g}, {format_size(self.board.free_bytes(instance))} left to KV"
            self.reasons.append(f"{claim.model} is placed on {instance}: {outcome}")
        self.board.check_integrity()
        return Placements(
            seats=seats,
            missing=self.missing,
            moves=tuple(sorted(self.moves)),
            failed_moves=frozenset(self.failed_moves),
            reasons=tuple(self.reasons),
            pressure={s.instance: self.board.pressure(s.instance) for s in self.board.seats},
        )

    def _n_placed(self, model: ModelName) -> int:
        """Replicas on the board, the two ends of a move counted as one."""
        return len(self.board.seats_of(model)) - sum(m.model == model for m in self.moves)

    def _moves_left(self) -> int:
        return self.board.rules.max_moves - len(self.moves)

    def _accepts(self, instance: InstanceName) -> bool:
        return instance in self.board and self.board.seat(instance).accepting

    def _drop(self, wish: Wish, instance: InstanceName, why: str) -> None:
        self.board.take(wish.claim, instance)
        self.moves = [m for m in self.moves if m.model != wish.model or instance not in (m.source, m.target)]
        self.reasons.append(f"{wish.model} leaves {instance}: {why}")

    @staticmethod
    def _held(wish: Wish, instance: InstanceName) -> Held:
        return next((h for h in wish.held if h.instance == instance), Held(instance=instance))
