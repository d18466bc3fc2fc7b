"""What the settings of all algorithms that learn from pairs have in common."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_algorithms.data.config import DataKind
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.run_settings import RunSettings
from rl_algorithms.trainers.settings.unused_keys import OF_CONVERSATIONS

__all__ = ["PairSettings", "PairTrainerConfig"]


class PairSettings(RunSettings):
    """For how long pairs are learned, and how it is measured."""

    val_global_batch_size: int = Field(32, gt=0)
    """Pairs per validation batch."""
    val_batches: int | None = Field(None, gt=0)
    """Validate on only that many batches, the first ones; null: on all rows."""


class PairTrainerConfig(TrainerConfig):
    """A run that learns from pairs, and samples nothing."""

    data_kind: ClassVar[DataKind | None] = "preferences"

    def unread(self) -> tuple[str, ...]:
        """Return the keys of algorithms that sample or imitate."""
        columns = ("data.output_key", "data.messages_key", "data.text_key")
        return ("env", "policy.generation", *columns, *OF_CONVERSATIONS)
