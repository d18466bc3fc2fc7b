"""Section `mismatch` of a configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_distributed.config import Config

__all__ = ["MismatchConfig"]


class MismatchConfig(Config):
    """Section `mismatch`: what log-probs of sampler and trainer may differ by."""

    statistic: Literal["mean", "p50", "p90", "p99", "max"] = "p99"
    """Which statistic of `|log p_trainer - log p_sampler|` of a step is limited."""
    limit: float | None = Field(1.0, gt=0)
    """Its largest value; null: none."""
    action: Literal["warn", "stop"] = "warn"
    """What happens above the limit: a warning, or the end of the run."""
