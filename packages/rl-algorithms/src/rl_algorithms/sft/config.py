"""Configuration of supervised fine-tuning."""

from __future__ import annotations

from pydantic import Field

from rl_algorithms.trainers.config import TrainerConfig
from rl_algorithms.trainers.run_settings import RunSettings

__all__ = ["SFTConfig", "SFTSettings"]


class SFTSettings(RunSettings):
    """Section `sft`."""

    val_global_batch_size: int = Field(32, gt=0)
    """Examples per validation batch."""
    val_batches: int | None = Field(8, gt=0)
    """At most so many validation batches; null: all."""
    val_greedy: bool = True
    """Take the most probable token when a validation samples answers."""


class SFTConfig(TrainerConfig):
    """Everything a supervised run needs.

    With `policy.generation` and an environment (section `env`, or one given to `fit`)
    each validation also samples answers, and reports `val:accuracy`.
    """

    output_dir: str = "runs/sft"
    """Folder of the run; see `TrainerConfig`."""
    sft: SFTSettings = Field(default_factory=SFTSettings)
    """The algorithm."""
