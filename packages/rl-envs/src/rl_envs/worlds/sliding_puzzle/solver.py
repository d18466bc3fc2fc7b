"""Boards of the sliding puzzle and their exact distances.

A board is a sequence of cells, row by row, with `.` for the gap: "123/4.5" is the text
of ("1", "2", "3", "4", ".", "5") with three columns. Distances come from a
breadth-first search that starts at the goal and visits every solvable board once, so a
board that it has not visited cannot be solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from rl_envs.errors import EnvsError

__all__ = [
    "GAP",
    "MAX_CELLS",
    "MOVES",
    "Board",
    "BoardError",
    "distances",
    "goal_of",
    "mirrored",
    "moved",
    "read_board",
    "solution",
]

GAP = "."
MAX_CELLS = 9
"""Maximum size: its 181,440 positions are searched once, in about a second."""
MOVES: Mapping[str, tuple[int, int]] = {
    "U": (1, 0),
    "D": (-1, 0),
    "L": (0, 1),
    "R": (0, -1),
}
"""Row and column of a tile relative to the gap, by its direction of movement."""
_TILES = "12345678"


class BoardError(EnvsError, ValueError):
    """A text is not a board of the sliding puzzle."""


class Board(NamedTuple):
    """Cells row by row, and the number of columns."""

    cells: str
    num_columns: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.cells) // self.num_columns

    @property
    def text(self) -> str:
        """The rows, joined by slashes."""
        width = self.num_columns
        starts = range(0, len(self.cells), width)
        return "/".join(self.cells[start : start + width] for start in starts)


def goal_of(num_rows: int, num_columns: int) -> Board:
    """Return the solved board: tiles in order, the gap last.

    Raises:
        BoardError: A side is shorter than 2, or there are more than 9 cells.
    """
    if min(num_rows, num_columns) < 2 or num_rows * num_columns > MAX_CELLS:
        raise BoardError(
            f"a board must have at least 2 rows, 2 columns and at most {MAX_CELLS} "
            f"cells: got {num_rows} x {num_columns}"
        )
    return Board(_TILES[: num_rows * num_columns - 1] + GAP, num_columns)


def read_board(text: str) -> Board:
    """Read a board such as "123/4.5".

    Raises:
        BoardError: Rows differ in length, or cells are not the tiles and one gap.
    """
    rows = text.split("/")
    board = Board("".join(rows), len(rows[0]))
    if len({len(row) for row in rows}) != 1:
        raise BoardError(f"the rows of a board must be equally long: got {text!r}")
    goal = goal_of(len(rows), board.num_columns)
    if sorted(board.cells) != sorted(goal.cells):
        raise BoardError(
            f"a board of this size must hold {' '.join(goal.cells)}, each once: got "
            f"{text!r}"
        )
    return board


def moved(board: Board, move: str) -> Board | None:
    """Move a tile next to the gap into it; return None if there is no such tile.

    Args:
        board: The board.
        move: A key of `MOVES`: the direction in which the tile moves.
    """
    cells, width = board
    gap = cells.index(GAP)
    below, right = MOVES[move]
    row, column = gap // width + below, gap % width + right
    if not (0 <= row < board.num_rows and 0 <= column < width):
        return None
    place = row * width + column
    tile = cells[place]
    # Through a third sign, as both exchange places.
    swapped = cells.replace(GAP, "#").replace(tile, GAP).replace("#", tile)
    return Board(swapped, width)


# Shared by tasks and environment, which ask for the same few sizes again and again.
@lru_cache(maxsize=8)
def distances(num_rows: int, num_columns: int) -> Mapping[str, int]:
    """Return the distance to the goal, in moves, by the cells of each solvable board.

    Raises:
        BoardError: There is no board of this size.
    """
    goal = goal_of(num_rows, num_columns)
    found = {goal.cells: 0}
    edge = [goal]
    while edge:
        depth = found[edge[0].cells] + 1
        reached = []
        for board in edge:
            for move in MOVES:
                after = moved(board, move)
                if after is not None and after.cells not in found:
                    found[after.cells] = depth
                    reached.append(after)
        edge = reached
    return found


def solution(board: Board) -> str:
    """Return a shortest sequence of moves to the goal, always the same one.

    Raises:
        BoardError: The board cannot be solved.
    """
    known = distances(board.num_rows, board.num_columns)
    if board.cells not in known:
        raise BoardError(
            f"board {board.text!r} cannot be solved: its tiles are an odd permutation; "
            "swap two of them"
        )
    moves = ""
    while known[board.cells]:
        for move in MOVES:
            after = moved(board, move)
            if after is not None and known[after.cells] < known[board.cells]:
                moves, board = moves + move, after
                # The first direction that leads closer: always the same solution.
                break
    return moves


def mirrored(board: Board) -> Board:
    """Return the same puzzle with rows and columns exchanged.

    Tiles are renamed according to their places in the goal, so that both boards have
    the same distance.
    """
    rows, width = board.num_rows, board.num_columns
    goal = goal_of(rows, width).cells
    turned_goal = goal_of(width, rows).cells
    place = [row * width + column for column in range(width) for row in range(rows)]
    names = {goal[old]: turned_goal[new] for new, old in enumerate(place)}
    return Board("".join(names[board.cells[old]] for old in place), rows)
