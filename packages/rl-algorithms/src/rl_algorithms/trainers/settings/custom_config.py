"""Default configuration of a trainer that declares none."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_algorithms.data.config import DataKind
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.run_settings import RunSettings

__all__ = ["CustomConfig"]


class CustomConfig(TrainerConfig):
    """Configuration of a trainer without a `config_class` of its own."""

    data_kind: ClassVar[DataKind | None] = "demonstrations"

    training: RunSettings = Field(default_factory=RunSettings)
    """Limits of the run and schedule of validations."""
