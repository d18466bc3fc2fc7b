"""Configuration of DPO."""

from __future__ import annotations

from pydantic import Field

from rl_algorithms.losses.dpo_config import DPOLossConfig
from rl_algorithms.trainers.settings.pair_config import PairSettings, PairTrainerConfig

__all__ = ["DPOConfig", "DPOSettings"]


class DPOSettings(PairSettings):
    """Section `dpo`."""

    precompute_reference_logprobs: bool = True
    """Compute the reference's log-probs of all pairs once, before the first step, and
    keep them in the run folder: no second copy of the model is needed. False: keep one,
    and ask it in each step; right for a run that sees a part of its data only."""


class DPOConfig(PairTrainerConfig):
    """Everything a DPO run needs.

    `policy.train_global_batch_size` counts pairs. `policy.train_micro_batch_size`
    counts rows, two for each pair, and is rounded up to whole pairs.
    """

    dpo: DPOSettings = Field(default_factory=DPOSettings)
    """The algorithm."""
    loss_fn: DPOLossConfig = Field(default_factory=DPOLossConfig)
    """The loss."""
