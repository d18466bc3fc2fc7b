"""Closed-form solution of nim: the winner and the winning moves.

Bouton (1901): in normal play, where the player who takes last wins, a position is lost
for the player to move if the exclusive or of all heaps is 0. In misère play, where the
player who takes last loses, the same holds while some heap has more than one object;
after that an odd number of heaps is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import xor
from typing import NamedTuple

from rl_envs.tasks import stable_fraction

__all__ = [
    "HEAP_NAMES",
    "NimMove",
    "after_move",
    "best_move",
    "is_won",
    "legal_moves",
    "random_move",
]

HEAP_NAMES = "ABCDEFGH"


class NimMove(NamedTuple):
    """Objects taken from one heap."""

    heap: int
    taken: int

    @property
    def text(self) -> str:
        """Notation of the move, such as "B2"."""
        return f"{HEAP_NAMES[self.heap]}{self.taken}"


def is_won(heaps: Sequence[int], *, misere: bool = False) -> bool:
    """Return True if the player to move wins under perfect play.

    Args:
        heaps: Number of objects in each heap; all 0: the opponent just took the last.
        misere: True if the player who takes last loses.
    """
    if misere and max(heaps, default=0) <= 1:
        return sum(heaps) % 2 == 0
    return reduce(xor, heaps, 0) != 0


def legal_moves(heaps: Sequence[int]) -> list[NimMove]:
    """Return all legal moves, ordered by heap, then by number."""
    return [
        NimMove(heap, taken)
        for heap, size in enumerate(heaps)
        for taken in range(1, size + 1)
    ]


def after_move(heaps: Sequence[int], move: NimMove) -> list[int]:
    """Return the heaps after a legal move."""
    return [size - move.taken * (heap == move.heap) for heap, size in enumerate(heaps)]


def best_move(heaps: Sequence[int], *, misere: bool = False) -> NimMove:
    """Return the first winning move; in a lost position, take a single object.

    Args:
        heaps: Number of objects in each heap, with at least one object in all.
        misere: True if the player who takes last loses.
    """
    for move in legal_moves(heaps):
        if not is_won(after_move(heaps, move), misere=misere):
            return move
    # No move wins: prolong the game, so that the other side may err.
    return NimMove(heaps.index(max(heaps)), 1)


def random_move(heaps: Sequence[int], *, seed: int) -> NimMove:
    """Return a uniformly drawn move that depends only on the position and the seed.

    A repeated turn therefore has the same reply.
    """
    moves = legal_moves(heaps)
    drawn = stable_fraction(f"{seed}/{list(heaps)}", salt="nim")
    return moves[int(drawn * len(moves))]
