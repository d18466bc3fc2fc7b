"""Settings of the reward model's loss. Imports neither torch nor a model."""

from __future__ import annotations

from pydantic import Field

from rl_distributed.config import Config

__all__ = ["PreferenceLossConfig"]


class PreferenceLossConfig(Config):
    """Options of `PreferenceLossFn`."""

    margin: float = Field(default=0.0, ge=0.0)
    """Margin by which the chosen answer's reward must exceed the other's
    (arXiv:2307.09288)."""
    center_rewards_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the squared sum of a pair's rewards, which keeps them around 0
    (arXiv:2312.09244); 0 for none."""
