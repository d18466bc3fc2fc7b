"""Who wins nim, in closed form, and by which move.

Bouton (1901): with normal play, where the last to take wins, a position is lost for
the player to move if the exclusive or of all heaps is 0. With misère play, where the
last to take loses, the same holds while some heap has more than one object; after that
an odd number of heaps is lost.
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
        """The move as it is written, such as "B2"."""
        return f"{HEAP_NAMES[self.heap]}{self.taken}"


def is_won(heaps: Sequence[int], *, misere: bool = False) -> bool:
    """Return whether the player to move wins if nobody errs.

    Args:
        heaps: Objects of each heap; all 0: the opponent has just taken the last.
        misere: Whether the last to take loses.
    """
    if misere and max(heaps, default=0) <= 1:
        return sum(heaps) % 2 == 0
    return reduce(xor, heaps, 0) != 0


def legal_moves(heaps: Sequence[int]) -> list[NimMove]:
    """Return all moves, by heap, then by number."""
    return [
        NimMove(heap, taken)
        for heap, size in enumerate(heaps)
        for taken in range(1, size + 1)
    ]


def after_move(heaps: Sequence[int], move: NimMove) -> list[int]:
    """Return the heaps after a legal move."""
    return [size - move.taken * (heap == move.heap) for heap, size in enumerate(heaps)]


def best_move(heaps: Sequence[int], *, misere: bool = False) -> NimMove:
    """Return the first move that wins; in a lost position, one that takes one object.

    Args:
        heaps: Objects of each heap, at least one.
        misere: Whether the last to take loses.
    """
    for move in legal_moves(heaps):
        if not is_won(after_move(heaps, move), misere=misere):
            return move
    # Nothing wins: leave as much as possible for the other side to err in.
    return NimMove(heaps.index(max(heaps)), 1)


def random_move(heaps: Sequence[int], *, seed: int) -> NimMove:
    """Return a move drawn by the position and a seed, all moves alike.

    It depends on nothing else, so that a turn can be played again.
    """
    moves = legal_moves(heaps)
    drawn = stable_fraction(f"{seed}/{list(heaps)}", salt="nim")
    return moves[int(drawn * len(moves))]
