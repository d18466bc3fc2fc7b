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
    """Clip range of values around those before the step, applied where it increases the
    loss; null for no clipping."""
