"""The sliding_puzzle environment, a dialogue of moves and boards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rl_envs.errors import MessageLogError
from rl_envs.outcomes import ConversationOutcome
from rl_envs.registry import register_env
from rl_envs.worlds.game import (
    Columns,
    GameConfig,
    GameEnvironment,
    GameTurn,
    said_move,
)
from rl_envs.worlds.sliding_puzzle.solver import (
    Board,
    BoardError,
    distances,
    moved,
    read_board,
    solution,
)

__all__ = ["SlidingPuzzleConfig", "SlidingPuzzleEnvironment", "board_prompt"]

_MOVE = r"up|down|left|right|[udlr]"
_MOVES = re.compile(rf"(?:(?:{_MOVE})[\s,]*)+", re.IGNORECASE)
_PROGRESS_SHARE = 0.5


class SlidingPuzzleConfig(GameConfig):
    """Settings of the sliding puzzle."""

    credit: Literal["solved", "efficient", "graded"] = "solved"
    """Scoring. `solved`: reward 1 for the solved board. `efficient`: optimal moves /
    moves used, so 1 for a shortest solution. `graded`: half of the reward is paid for
    coming closer than the start, by exact distance, and taken back for moving away; a
    conversation earns 1 if it solves the board, else less than a half."""
    max_moves_per_response: int = Field(1, ge=1)
    """Maximum number of moves per response; a response with more is illegal."""


@register_env("sliding_puzzle")
class SlidingPuzzleEnvironment(GameEnvironment):
    """Moves tiles as requested by the responses, until the board is in order.

    A row has the column `board`, such as "123/4.5", and optionally `style`, `compact`
    or `words` (the default). A response is a move, the direction in which a tile moves
    into the gap: U, D, L, R or the words; several if the settings allow it. Moves are
    made in order up to the first impossible one, which is illegal; the reply is the
    board, preceded by a `!` or a sentence if anything was illegal.

    Args:
        config: The settings.
    """

    config_class = SlidingPuzzleConfig

    def __init__(self, config: SlidingPuzzleConfig | None = None) -> None:
        self.config = config or SlidingPuzzleConfig()
        super().__init__(self.config)
        self._credit = self.config.credit
        self._max_moves = self.config.max_moves_per_response

    def start(self, columns: Columns, row: int) -> Mapping[str, Any]:
        """Return the board of the row.

        Raises:
            MessageLogError: It is not a board, unsolvable, or already solved.
        """
        text, style = columns.get("board"), columns.get("style", "words")
        try:
            moves = solution(read_board(text)) if isinstance(text, str) else ""
            problem = "" if moves else "it is not a board, or already solved"
        except BoardError as error:
            problem = str(error)
        if problem or style not in ("compact", "words"):
            raise MessageLogError(
                f"metadata[{row}] must have the column 'board', a text such as "
                "'123/4.5' that can be solved, and 'style' must be 'compact' or "
                f"'words': got {text!r} and {style!r}"
                f"{f' ({problem})' if problem else ''}"
            )
        return {"board": text, "moves": 0, "optimal": len(moves)}

    def play(
        self, columns: Columns, state: Mapping[str, Any], response: str
    ) -> GameTurn:
        """Play the moves of a response."""
        before = board = read_board(state["board"])
        moves = _read_moves(said_move(response))
        used, problem = state["moves"], ""
        if not moves:
            problem = "That is no move: answer U, D, L or R."
        elif len(moves) > self._max_moves:
            problem = f"At most {self._max_moves} moves at a time."
            moves = ""
        if not moves:
            # Counts as a move: otherwise `efficient` would not punish idling.
            used += 1
        for move in moves:
            after = moved(board, move)
            used += 1
            # Moves before it stay made: the board shown next tells the model how far it
            # came.
            if after is None:
                problem = f"No tile can move {move} on this board."
                break
            board = after
            # Solved: further moves would leave the goal again.
            if not _distance(board):
                break
        solved = not _distance(board)
        state = {**state, "board": board.text, "moves": used}
        return GameTurn(
            state,
            _shown(board, problem, compact=columns.get("style") == "compact"),
            self._reward(state, before, board),
            ConversationOutcome.SOLVED if solved else None,
            is_legal=not problem,
            answer=moves or None,
        )

    def _reward(self, state: Mapping[str, Any], before: Board, after: Board) -> float:
        """Return the reward of a turn.

        The graded part is a difference of potentials (Ng et al., 1999), so that the
        turns of a conversation add up to the potential of its last board, and moving
        back and forth earns nothing.
        """
        solved = not _distance(after)
        if self._credit == "solved":
            return float(solved)
        if self._credit == "efficient":
            return state["optimal"] / state["moves"] if solved else 0.0
        gained = _potential(after, state["optimal"]) - _potential(
            before, state["optimal"]
        )
        return _PROGRESS_SHARE * gained + (1 - _PROGRESS_SHARE) * solved


def _distance(board: Board) -> int:
    return distances(board.num_rows, board.num_columns)[board.cells]


def _potential(board: Board, optimal: int) -> float:
    """Return 1 for the goal, and 0 for boards at least as far as the start."""
    return max(0.0, 1.0 - _distance(board) / optimal)


def _read_moves(text: str) -> str:
    """Return the moves as letters; "" if the text is something else."""
    if not _MOVES.fullmatch(text):
        return ""
    return "".join(
        word[0].upper() for word in re.findall(_MOVE, text, flags=re.IGNORECASE)
    )


def _shown(board: Board, problem: str, *, compact: bool) -> str:
    if compact:
        return f"{'!' if problem else ''}{board.text}>"
    lines = [problem] if problem else []
    return "\n".join([*lines, *_lines(board)])


def _lines(board: Board) -> list[str]:
    return [" ".join(row) for row in board.text.split("/")]


def board_prompt(board: Board, style: str, max_moves_per_response: int = 1) -> str:
    """Return the first message of a conversation.

    Args:
        board: The initial board.
        style: `compact`: "12/.3>". `words`: the rules and the board.
        max_moves_per_response: Limit stated in the rules.
    """
    if style == "compact":
        return _shown(board, "", compact=True)
    goal = "".join(sorted(board.cells.replace(".", ""))) + "."
    shown_goal = Board(goal, board.num_columns).text.replace("/", " / ")
    how_many = (
        "one move"
        if max_moves_per_response == 1
        else f"up to {max_moves_per_response} moves"
    )
    return "\n".join(
        [
            f"Slide the tiles until the board reads {shown_goal}, where the dot is the "
            f"gap. Answer each board with {how_many}, as <move>...</move>: U, D, L or "
            "R, the direction in which a tile moves into the gap.",
            *_lines(board),
        ]
    )
