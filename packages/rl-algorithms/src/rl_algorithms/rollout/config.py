"""Settings of rollouts. Imports neither torch nor a model."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from rl_distributed.config import Config

__all__ = ["RetryConfig", "RolloutConfig", "RolloutSettings"]

RetryOutcome = Literal["environment_error", "infrastructure_error", "stale"]


class RetryConfig(Config):
    """When and how conversations that failed are sampled again."""

    max_attempts: int = Field(default=1, ge=1)
    """How often a conversation is played at most; 1: it is not played again."""
    outcomes: list[RetryOutcome] = Field(
        default_factory=lambda: list(get_args(RetryOutcome))
    )
    """Endings after which it is."""
    resample: Literal["row", "group"] = "row"
    """Play only what failed again, or all conversations of its prompt."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Seconds after the start of the first attempt in which others may begin.

    Null: any.
    """


class RolloutSettings(Config):
    """What to do about conversations that do not go as planned."""

    on_environment_error: Literal["raise", "drop"] = "raise"
    """When environment or generator still fail after the last attempt: end the run, or
    leave the rows out and count them. Rows that the environment did not score (NaN) are
    left out and counted in either case."""
    max_failed_rate: float = Field(default=0.5, ge=0.0, le=1.0)
    """Largest part of a batch's rows that may be left out so before the run ends."""
    incomplete_groups: Literal["keep", "drop"] = "keep"
    """What becomes of the other conversations of a prompt when one is left out: they
    are trained on as a smaller group, or left out as well."""
    on_template_rewrite: Literal["error", "branch"] = "error"
    """When the chat template writes earlier messages differently once later ones
    follow: end the run, or go on from the new text, with what was sampled before as a
    training row of its own."""
    max_staleness: int | None = Field(default=None, ge=0)
    """How many versions the weights may have moved on since they sampled a row's oldest
    token; older rows are left out. null: no limit."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """Attempts to replace conversations that failed."""


class RolloutConfig(RolloutSettings):
    """How conversations are played."""

    max_turns: int = Field(default=1, ge=1)
    """Answers per conversation; with 1 the environment only judges."""
    max_total_sequence_length: int | None = Field(default=None, ge=2)
    """Tokens of a whole conversation; a longer one ends as truncated."""
    min_answer_room: int = Field(default=1, ge=1)
    """Tokens that a further answer must have room for, as generators may refuse less; a
    conversation without that room ends as truncated."""
