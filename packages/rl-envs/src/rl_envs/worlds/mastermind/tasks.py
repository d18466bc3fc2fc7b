"""Mastermind tasks, each with a secret."""

from __future__ import annotations

import random

from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice
from rl_envs.worlds.game import Columns
from rl_envs.worlds.mastermind.environment import mastermind_prompt
from rl_envs.worlds.mastermind.solver import (
    MAX_CODES,
    SYMBOLS,
    Feedback,
    next_guess,
)

__all__ = ["MastermindTasks"]


@register_task_source("mastermind")
class MastermindTasks(TaskSource):
    """Draws secrets uniformly.

    All tasks have the same prompt; only feedback distinguishes them. The split depends
    on the sorted digits, so that no reordering of a held-out secret is trained on.

    Args:
        length: Number of digits in the secret, at least 2.
        num_symbols: Number of digits to choose from, 2 to 9; at most 10,000 codes.
        style: `compact`: "4x6>", for the smallest models. `words`: the rules.
        seed: Seed of the samples.
        held_out_fraction: Share of all sets of digits that are held out.

    Raises:
        TaskError: A size or the style is invalid.
    """

    def __init__(
        self,
        length: int = 4,
        *,
        num_symbols: int = 6,
        style: str = "compact",
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("mastermind", seed=seed, held_out_fraction=held_out_fraction)
        if length < 2 or not 2 <= num_symbols <= len(SYMBOLS):
            raise TaskError(
                f"length must be at least 2, and num_symbols 2 to {len(SYMBOLS)}: got "
                f"{length} and {num_symbols}"
            )
        # The first test keeps the power small, however large the length given.
        if length > 20 or num_symbols**length > MAX_CODES:
            raise TaskError(
                f"num_symbols ** length must be at most {MAX_CODES}: got "
                f"{num_symbols} ** {length}; lower one of them"
            )
        check_choice("style", style, "compact", "words")
        self.length, self.num_symbols, self.style = length, num_symbols, style

    def propose(self, rng: random.Random) -> Task:
        """Draw a secret."""
        secret = "".join(rng.choices(SYMBOLS[: self.num_symbols], k=self.length))
        return Task(
            prompt=mastermind_prompt(self.length, self.num_symbols, self.style),
            answer=secret,
            metadata={
                "secret": secret,
                "num_symbols": self.num_symbols,
                "style": self.style,
            },
        )

    def identity(self, task: Task) -> str:
        """Return the secret, since all prompts are the same."""
        return task.answer

    def key(self, task: Task) -> str:
        """Return the sorted digits of the secret."""
        return "".join(sorted(task.answer))

    def consistent(self, columns: Columns) -> str:
        """Return the response of a player whose guesses are always consistent.

        Args:
            columns: A row, or the metadata of a later turn.
        """
        history = [
            (guess, Feedback(exact, misplaced))
            for guess, exact, misplaced in columns.get("game", {}).get("guesses", ())
        ]
        guess = next_guess(history, self.length, self.num_symbols)
        return guess if self.style == "compact" else f"<move>{guess}</move>"

    @property
    def alphabet(self) -> str:
        """All distinct characters of compact conversations."""
        return "0123456789x,>!"
