"""Settings of rollouts. Imports neither torch nor a model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_distributed.config import Config

__all__ = ["RolloutConfig"]


class RolloutConfig(Config):
    """How conversations are played."""

    max_turns: int = Field(default=1, ge=1)
    """Answers per conversation; with 1 the environment only judges."""
    max_total_sequence_length: int | None = Field(default=None, ge=2)
    """Tokens of a whole conversation; a longer one ends as truncated."""
    on_environment_error: Literal["raise", "drop"] = "raise"
    """When the environment fails: end the run, or leave the rows out and count them.
    Rows that it did not score (NaN) are left out and counted in either case."""
    max_failed_rate: float = Field(default=0.5, ge=0.0, le=1.0)
    """Largest part of a batch's rows that may be left out so before the run ends."""
