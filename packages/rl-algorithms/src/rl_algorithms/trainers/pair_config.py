"""What the settings of all algorithms that learn from pairs have in common."""

from __future__ import annotations

from pydantic import Field

from rl_algorithms.trainers.run_settings import RunSettings

__all__ = ["PairSettings"]


class PairSettings(RunSettings):
    """For how long pairs are learned, and how it is measured."""

    val_global_batch_size: int = Field(32, gt=0)
    """Pairs per validation batch."""
    val_batches: int | None = Field(8, gt=0)
    """At most so many validation batches; null: all."""
