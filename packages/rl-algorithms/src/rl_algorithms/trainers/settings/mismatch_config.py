"""Section `mismatch` of a configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_distributed.config import Config

__all__ = ["MismatchConfig"]


class MismatchConfig(Config):
    """Section `mismatch`: limit on the difference of log-probs between both sides."""

    statistic: Literal["mean", "p50", "p90", "p99", "max"] = "p99"
    """Statistic of `|log p_trainer - log p_sampler|` over a step that is limited."""
    limit: float | None = Field(1.0, gt=0)
    """Largest value of the statistic; null for no limit."""
    action: Literal["warn", "stop"] = "warn"
    """Reaction to a larger value: a warning, or the end of the run."""
