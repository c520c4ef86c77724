"""Bounded search for a seating of replicas that greedy could not seat: first of those that run nowhere yet, then with moves.

Greedy fails on some feasible cases, because it spreads where it should have kept a large hole. The search is exhaustive
within its steps, so small cases are exact and large ones cost a fraction of a second.
"""

from collections.abc import Sequence
from itertools import combinations

from aerostat_core.ids import InstanceName
from aerostat_operator.policy.kvpr import Board, Claim

STEPS_PER_MODEL = 10_000  # seats looked at, for one model that greedy could not seat
STEPS_PER_DECISION = 50_000
MOST_MOVED = 3  # replicas that are moved to make room for one; more disturbs more than it helps

Seating = list[tuple[Claim, InstanceName]]


class Search:
    """Depth first, the largest claim first, the seat with the least resulting pressure first. Leaves the board as it was."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._empty = Board(board.rules, board.seats)
        self._steps_of_all = STEPS_PER_DECISION
        self._steps_left = 0

    def pack(self, claims: Sequence[Claim], movable: Seating) -> Seating | None:
        """A seat for each claim on top of what is on the board, or None.

        Where that is not enough, as few as possible of `movable` (which are on the board) go elsewhere; the answer
        names their new seats too.
        """
        if not all(any(self._empty.fits(claim, seat.instance) for seat in self._board.seats) for claim in claims):
            return None
        granted = self._steps_left = min(STEPS_PER_MODEL, self._steps_of_all)
        found = self._first(claims, movable)
        self._steps_of_all -= granted - max(self._steps_left, 0)
        return found

    def _first(self, claims: Sequence[Claim], movable: Seating) -> Seating | None:
        for n in range(min(MOST_MOVED, len(movable)) + 1):
            for moved in combinations(movable, n):
                for claim, instance in moved:
                    self._board.take(claim, instance)
                found = self._descend(sorted([*claims, *(c for c, _ in moved)], key=lambda c: (-c.fixed_bytes, c.model)))
                for claim, instance in moved:
                    self._board.put(claim, instance)
                if found is not None or self._steps_left <= 0:
                    return found
        return None

    def _descend(self, claims: Sequence[Claim]) -> Seating | None:
        if not claims:
            return []
        claim, rest = claims[0], claims[1:]
        for instance in self._options(claim):
            self._board.put(claim, instance)
            found = self._descend(rest)
            self._board.take(claim, instance)
            if found is not None:
                return [(claim, instance), *found]
        return None

    def _options(self, claim: Claim) -> list[InstanceName]:
        """Seats with room, the best first; of seats that are alike only one. None once the steps are used up."""
        board = self._board
        self._steps_left -= len(board.seats)
        if self._steps_left < 0:
            return []
        alike: dict[tuple[object, ...], InstanceName] = {}
        for seat in board.seats:
            present = tuple(sorted(c.model for c in board.at(seat.instance)))
            node = seat.node if board.rules.host_bytes else ""
            if (key := (seat.capacity_bytes, node, present)) not in alike and board.fits(claim, seat.instance):
                alike[key] = seat.instance
        return sorted(alike.values(), key=lambda i: (board.pressure(i, claim), i))
