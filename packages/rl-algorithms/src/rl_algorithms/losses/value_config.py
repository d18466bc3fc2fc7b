"""Settings of the critic's loss. Imports neither torch nor a model."""

from __future__ import annotations

from pydantic import Field

from rl_distributed.config import Config

__all__ = ["MseValueLossConfig"]


class MseValueLossConfig(Config):
    """Options of `MseValueLossFn`."""

    scale: float = Field(default=1.0, gt=0.0)
    """Factor of the loss."""
    cliprange: float | None = Field(default=None, gt=0.0)
    """A value counts as no further than this from its value before the step, where that
    makes the loss larger; null: no clipping."""
