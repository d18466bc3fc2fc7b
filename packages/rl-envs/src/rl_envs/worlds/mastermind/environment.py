"""The mastermind environment."""

from __future__ import annotations

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
from rl_envs.worlds.mastermind.solver import MAX_CODES, SYMBOLS, feedback_of

__all__ = ["MastermindConfig", "MastermindEnvironment", "mastermind_prompt"]


class MastermindConfig(GameConfig):
    """Settings of mastermind."""

    max_turns: int = Field(10, ge=1)
    """Maximum number of guesses, legal or not, after which a conversation ends as
    `out_of_turns`."""
    credit: Literal["solved", "early"] = "solved"
    """Scoring. `solved`: reward 1 for the secret. `early`: 1 for it in the first turn,
    less 1 / `max_turns` for each earlier guess."""


@register_env("mastermind")
class MastermindEnvironment(GameEnvironment):
    """Answers each guess with its numbers of exact and of misplaced digits.

    A row has the columns `secret`, a text of two or more digits from 1 to
    `num_symbols`, the second column, and optionally `style`, `compact` or `words` (the
    default). A guess has the same number of such digits; blanks between them are
    ignored.

    Args:
        config: The settings.
    """

    config_class = MastermindConfig

    def __init__(self, config: MastermindConfig | None = None) -> None:
        self.config = config or MastermindConfig()
        super().__init__(self.config)
        self._pays_early = self.config.credit == "early"

    def start(self, columns: Columns, row: int) -> Mapping[str, Any]:
        """Return the initial state, without guesses.

        Raises:
            MessageLogError: A column is missing or invalid.
        """
        secret, num_symbols = columns.get("secret"), columns.get("num_symbols")
        style = columns.get("style", "words")
        fits = (
            isinstance(secret, str)
            # Not isinstance: a bool would count as an int.
            and type(num_symbols) is int
            and len(secret) >= 2
            and 2 <= num_symbols <= len(SYMBOLS)
            and num_symbols ** len(secret) <= MAX_CODES
            and set(secret) <= set(SYMBOLS[:num_symbols])
            and style in ("compact", "words")
        )
        if not fits:
            raise MessageLogError(
                f"metadata[{row}] must have the columns 'num_symbols', 2 to "
                f"{len(SYMBOLS)}, and 'secret', a text of two or more digits from 1 to "
                f"that number with at most {MAX_CODES} possible codes; 'style' must be "
                f"'compact' or 'words': got {num_symbols!r}, {secret!r} and {style!r}"
            )
        return {"guesses": []}

    def play(
        self, columns: Columns, state: Mapping[str, Any], response: str
    ) -> GameTurn:
        """Compare a guess with the secret."""
        secret, num_symbols = columns["secret"], columns["num_symbols"]
        compact = columns.get("style") == "compact"
        guess = "".join(said_move(response).split())
        if len(guess) != len(secret) or not set(guess) <= set(SYMBOLS[:num_symbols]):
            problem = (
                f"A guess has {len(secret)} digits from 1 to {num_symbols}, such as "
                f"{'1' * len(secret)}."
            )
            return GameTurn(state, "!>" if compact else problem, is_legal=False)
        exact, misplaced = feedback_of(guess, secret)
        solved = exact == len(secret)
        told = (
            f"{exact},{misplaced}>"
            if compact
            else f"{exact} in place, {misplaced} elsewhere"
        )
        return GameTurn(
            {**state, "guesses": [*state["guesses"], [guess, exact, misplaced]]},
            told,
            self._reward(state["turns"]) if solved else 0.0,
            ConversationOutcome.SOLVED if solved else None,
            answer=guess,
        )

    def _reward(self, turns_before: int) -> float:
        lost = turns_before / self.config.max_turns if self._pays_early else 0.0
        return 1.0 - lost


def mastermind_prompt(length: int, num_symbols: int, style: str) -> str:
    """Return the first message of a conversation.

    Args:
        length: Number of symbols in the secret.
        num_symbols: Number of different symbols.
        style: `compact`: "4x6>". `words`: the rules.
    """
    if style == "compact":
        return f"{length}x{num_symbols}>"
    return (
        f"I have chosen a secret of {length} digits from 1 to {num_symbols}; a digit "
        "may occur more than once. I answer each guess with the number of digits in "
        "their place, and of others that occur elsewhere. Guess as <move>...</move>."
    )
