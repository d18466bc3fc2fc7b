"""Sliding puzzle tasks: boards at a known distance from the goal."""

from __future__ import annotations

import random
from typing import Any

from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice
from rl_envs.worlds.game import Columns, played
from rl_envs.worlds.sliding_puzzle.environment import (
    SlidingPuzzleConfig,
    SlidingPuzzleEnvironment,
    board_prompt,
)
from rl_envs.worlds.sliding_puzzle.solver import (
    Board,
    BoardError,
    distances,
    mirrored,
    read_board,
    solution,
)

__all__ = ["SlidingPuzzleTasks"]


@register_task_source("sliding_puzzle")
class SlidingPuzzleTasks(TaskSource):
    """Draws boards uniformly from all at the required distances from the goal.

    Boards come from a search that starts at the goal, so that each can be solved and
    its difficulty is exact. The answer of a task is a shortest sequence of moves. The
    split treats a board and its mirror image alike. It separates initial boards;
    conversations pass through boards of either split.

    Args:
        num_rows: Number of rows, at least 2.
        num_columns: Number of columns, at least 2; at most 9 cells in all.
        min_distance: Minimum distance to the goal, in moves.
        max_distance: Maximum distance; None: up to the farthest boards.
        style: `compact`: "12/.3>", for the smallest models. `words`: rules and board.
        max_moves_per_response: Limit stated by the rules of `words` and used by
            demonstrations; give the environment the same number.
        seed: Seed of the samples.
        held_out_fraction: Share of all boards that are held out.

    Raises:
        TaskError: A size, a distance or the style is invalid.
    """

    def __init__(
        self,
        num_rows: int = 3,
        num_columns: int = 3,
        *,
        min_distance: int = 1,
        max_distance: int | None = None,
        style: str = "compact",
        max_moves_per_response: int = 1,
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__(
            "sliding_puzzle", seed=seed, held_out_fraction=held_out_fraction
        )
        try:
            known = distances(num_rows, num_columns)
        except BoardError as error:
            raise TaskError(f"num_rows and num_columns: {error}") from None
        farthest = max(known.values())
        most = farthest if max_distance is None else max_distance
        if not 1 <= min_distance <= most <= farthest:
            raise TaskError(
                "distances must satisfy 1 <= min_distance <= max_distance <= "
                f"{farthest}, the farthest on {num_rows} x {num_columns}: got "
                f"{min_distance} and {max_distance}"
            )
        check_choice("style", style, "compact", "words")
        if max_moves_per_response < 1:
            raise TaskError(
                "max_moves_per_response must be at least 1: got "
                f"{max_moves_per_response}"
            )
        self.style, self.max_moves_per_response = style, max_moves_per_response
        self._boards = [
            Board(cells, num_columns)
            for cells, distance in known.items()
            if min_distance <= distance <= most
        ]

    def propose(self, rng: random.Random) -> Task:
        """Draw one of the boards."""
        board = rng.choice(self._boards)
        moves = solution(board)
        return Task(
            prompt=board_prompt(board, self.style, self.max_moves_per_response),
            answer=moves,
            metadata={
                "board": board.text,
                "distance": len(moves),
                "style": self.style,
            },
        )

    def key(self, task: Task) -> str:
        """Return the smaller of the board and its mirror image."""
        board = read_board(task.metadata["board"])
        # One key for both: knowing one solution is knowing the other.
        return min(board.text, mirrored(board).text)

    def demonstrations(
        self, num_tasks: int, *, unique: bool = True
    ) -> list[dict[str, Any]]:
        """Return conversations to imitate, whose `answer` is the list of messages."""
        config = SlidingPuzzleConfig(max_moves_per_response=self.max_moves_per_response)
        environment = SlidingPuzzleEnvironment(config)
        rows = super().demonstrations(num_tasks, unique=unique)
        return [
            {**row, "answer": played(environment, row, self.shortest).messages[1:]}
            for row in rows
        ]

    def shortest(self, columns: Columns) -> str:
        """Return the response of a player who follows a shortest path.

        Args:
            columns: A row, or the metadata of a later turn.
        """
        # The first turn has the row only; later ones have the state of the game.
        board = columns.get("game", columns)["board"]
        moves = solution(read_board(board))[: self.max_moves_per_response]
        return moves if self.style == "compact" else f"<move>{' '.join(moves)}</move>"

    @property
    def alphabet(self) -> str:
        """All distinct characters of compact conversations."""
        return "12345678./>!UDLR"
