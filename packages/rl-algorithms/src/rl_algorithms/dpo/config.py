"""Configuration of DPO."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rl_algorithms.losses.dpo_config import DPOLossConfig
from rl_algorithms.trainers.config import TrainerConfig
from rl_distributed.config import Config

__all__ = ["DPOConfig", "DPOSettings"]


class DPOSettings(Config):
    """Section `dpo`."""

    precompute_reference_logprobs: bool = True
    """Compute the reference's log-probs of all pairs once, before the first step, and
    keep them in the run folder: no second copy of the model is needed. False: keep one,
    and ask it in each step; right for a run that sees a part of its data only."""
    max_num_epochs: int | None = Field(1, gt=0)
    """Passes over the pairs; null: no limit."""
    max_num_steps: int | None = Field(None, gt=0)
    """Optimizer steps; null: no limit."""
    val_period: int = Field(10, ge=0)
    """Steps between two validations; 0: none."""
    val_start_at: int = -1
    """No periodic validation before this step."""
    val_at_start: bool = False
    """Also validate before the first step."""
    val_at_end: bool = False
    """Also validate after the last step."""
    val_global_batch_size: int = Field(32, gt=0)
    """Pairs per validation batch."""
    val_batches: int | None = Field(8, gt=0)
    """At most so many validation batches; null: all."""
    stop_at_validation_metric: str | None = None
    """`val:accuracy`, `val:loss`, ...: its goal ends the run; null: none."""
    stop_at_validation_threshold: float | None = None
    """The goal; a loss must fall to it, anything else must rise to it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_num_epochs is None and self.max_num_steps is None:
            raise ValueError(
                "max_num_epochs and max_num_steps are both null: the run would never "
                "end; set one of them"
            )
        if (self.stop_at_validation_metric is None) != (
            self.stop_at_validation_threshold is None
        ):
            raise ValueError(
                "stop_at_validation_metric and stop_at_validation_threshold belong "
                f"together: got {self.stop_at_validation_metric!r} and "
                f"{self.stop_at_validation_threshold!r}"
            )
        return self


class DPOConfig(TrainerConfig):
    """Everything a DPO run needs.

    `policy.train_global_batch_size` counts pairs. `policy.train_micro_batch_size`
    counts rows, two for each pair, and is rounded up to whole pairs.
    """

    output_dir: str = "runs/dpo"
    """Folder of the run; see `TrainerConfig`."""
    dpo: DPOSettings = Field(default_factory=DPOSettings)
    """The algorithm."""
    loss_fn: DPOLossConfig = Field(default_factory=DPOLossConfig)
    """The loss."""
