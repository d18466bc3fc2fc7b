"""Configuration of supervised fine-tuning."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rl_algorithms.trainers.config import TrainerConfig
from rl_algorithms.trainers.run_settings import RunSettings
from rl_algorithms.trainers.unread import OF_PAIRS

__all__ = ["SFTConfig", "SFTSettings"]


class SFTSettings(RunSettings):
    """Section `sft`."""

    val_global_batch_size: int = Field(32, gt=0)
    """Examples per validation batch."""
    val_batches: int | None = Field(8, gt=0)
    """At most so many validation batches; null: all."""
    val_greedy: bool = True
    """Take the most probable token when a validation samples answers."""
    accuracy_threshold: float | None = None
    """A sampled answer is right if its reward is at least this; null: `val:accuracy` is
    what the environment calls accuracy, where it calls anything so."""


class SFTConfig(TrainerConfig):
    """Everything a supervised run needs.

    With `policy.generation` and an environment (section `env`, or one given to `fit`)
    each validation also samples answers, and reports `val:reward`, and `val:accuracy`
    where the environment says which answers are right (or `sft.accuracy_threshold`).
    """

    sft: SFTSettings = Field(default_factory=SFTSettings)
    """The algorithm."""

    def unread(self) -> tuple[str, ...]:
        """Return the keys of other algorithms, and of answers that nobody samples."""
        if self.policy.generation is not None:
            return OF_PAIRS
        return (*OF_PAIRS, "sft.val_greedy", "sft.accuracy_threshold")

    @model_validator(mode="after")
    def _check_env(self) -> Self:
        if self.env is not None and self.policy.generation is None:
            raise ValueError(
                "env scores the answers of validations, and policy.generation says how "
                "they are sampled: give it max_new_tokens, or leave env out"
            )
        return self
