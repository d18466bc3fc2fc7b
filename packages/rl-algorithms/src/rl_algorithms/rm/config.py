"""Configuration of reward-model training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from rl_algorithms.losses.preference_config import PreferenceLossConfig
from rl_algorithms.trainers.settings.pair_config import PairSettings, PairTrainerConfig

__all__ = ["RMConfig", "RMSettings"]


class RMSettings(PairSettings):
    """Section `rm`."""


class RMConfig(PairTrainerConfig):
    """Configuration of the training of a reward model.

    `policy` is the reward model, with the head `reward`.
    `policy.train_global_batch_size` counts pairs. `policy.train_micro_batch_size`
    counts rows, two per pair, and is rounded up to whole pairs.
    """

    rm: RMSettings = Field(default_factory=RMSettings)
    """Settings of the algorithm."""
    loss_fn: PreferenceLossConfig = Field(default_factory=PreferenceLossConfig)
    """The loss."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("policy"), Mapping):
            return data
        return {**data, "policy": {"head": "reward", **data["policy"]}}

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        if self.policy.head == "lm":
            raise ValueError(
                "policy.head must be reward (or value, a number for every token): got "
                "'lm'; leave it out"
            )
        return self
