"""Settings of rollouts. Imports neither torch nor a model."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from rl_distributed.config import Config

__all__ = ["RetryConfig", "RolloutConfig", "RolloutSettings"]

RetryOutcome = Literal["environment_error", "infrastructure_error", "stale"]


class RetryConfig(Config):
    """Retries of conversations that failed."""

    max_attempts: int = Field(default=1, ge=1)
    """Maximum number of attempts at a conversation; 1 for no retry."""
    outcomes: list[RetryOutcome] = Field(
        default_factory=lambda: list(get_args(RetryOutcome))
    )
    """Outcomes after which a conversation is retried."""
    resample: Literal["row", "group"] = "row"
    """Scope of a retry: the failed conversation alone, or all conversations of its
    prompt."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Seconds after the start of the first attempt within which further attempts may
    begin; null for no limit."""


class RolloutSettings(Config):
    """Handling of conversations that do not go as planned."""

    on_environment_error: Literal["raise", "drop"] = "raise"
    """Reaction to an environment or generator that still fails after the last attempt:
    end the run, or drop the rows and count them. Rows that the environment did not
    score (NaN) are dropped and counted in either case."""
    max_failed_rate: float = Field(default=0.5, ge=0.0, le=1.0)
    """Largest share of a batch's rows that may be dropped this way before the run
    ends."""
    incomplete_groups: Literal["keep", "drop"] = "keep"
    """Treatment of a prompt's other conversations when one is dropped: train on them as
    a smaller group, or drop them as well."""
    on_template_rewrite: Literal["error", "branch"] = "error"
    """Reaction to a chat template that renders earlier messages differently once later
    ones follow: end the run, or continue from the new text and make the tokens sampled
    before a training row of their own."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Maximum number of versions by which the weights may have advanced since they
    sampled a row's oldest token; older rows are dropped. null for no limit."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """Retries of conversations that failed."""


class RolloutConfig(RolloutSettings):
    """Length and handling of conversations."""

    max_turns: int = Field(default=1, ge=1)
    """Maximum number of answers per conversation; 1: the environment only judges."""
    max_total_sequence_length: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of a whole conversation; a longer one is truncated."""
    min_answer_room: int = Field(default=1, ge=1)
    """Minimum number of tokens left for another answer, because generators may refuse
    less; a conversation without that room ends as truncated."""
