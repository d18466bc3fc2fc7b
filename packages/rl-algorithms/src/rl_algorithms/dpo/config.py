"""Configuration of DPO."""

from __future__ import annotations

from pydantic import Field

from rl_algorithms.losses.dpo_config import DPOLossConfig
from rl_algorithms.trainers.settings.pair_config import PairSettings, PairTrainerConfig

__all__ = ["DPOConfig", "DPOSettings"]


class DPOSettings(PairSettings):
    """Section `dpo`."""

    precompute_reference_logprobs: bool = True
    """Whether to compute the reference's log-probs of all pairs once, before the first
    step, and keep them in the run folder, so that no second copy of the model is
    needed. With false, a copy is kept and used in each step, which suits a run that
    sees only a part of its data."""


class DPOConfig(PairTrainerConfig):
    """Configuration of a DPO run.

    `policy.train_global_batch_size` counts pairs. `policy.train_micro_batch_size`
    counts rows, two per pair, and is rounded up to whole pairs.
    """

    dpo: DPOSettings = Field(default_factory=DPOSettings)
    """Settings of the algorithm."""
    loss_fn: DPOLossConfig = Field(default_factory=DPOLossConfig)
    """The loss."""
