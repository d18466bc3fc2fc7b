"""Settings shared by the algorithms that learn from pairs."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_algorithms.data.config import DataKind
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.run_settings import RunSettings
from rl_algorithms.trainers.settings.unused_keys import OF_CONVERSATIONS

__all__ = ["PairSettings", "PairTrainerConfig"]


class PairSettings(RunSettings):
    """Limits of the run and schedule of validations on pairs."""

    val_global_batch_size: int = Field(32, gt=0)
    """Number of pairs per validation batch."""
    val_batches: int | None = Field(None, gt=0)
    """Number of validation batches to use, from the first; null for all rows."""


class PairTrainerConfig(TrainerConfig):
    """Configuration of a run that learns from pairs and samples nothing."""

    data_kind: ClassVar[DataKind | None] = "preferences"

    def unread(self) -> tuple[str, ...]:
        """Return the keys read only by algorithms that sample or imitate."""
        columns = ("data.output_key", "data.messages_key", "data.text_key")
        return ("env", "policy.generation", *columns, *OF_CONVERSATIONS)
