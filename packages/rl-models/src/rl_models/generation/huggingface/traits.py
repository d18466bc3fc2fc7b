"""Traits of the backend `huggingface` for the driver, without its libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_models.generation.config import GenerationConfig
from rl_models.generation.traits import GenerationTraits
from rl_models.lora_config import LoRAConfig

__all__ = ["Traits"]


class Traits(GenerationTraits):
    """Traits of the backend that differ from the defaults."""

    @staticmethod
    def check_adapter(
        config: GenerationConfig,
        lora: LoRAConfig,
        model_config: Mapping[str, Any],
        *,
        on_gpu: bool,
    ) -> None:
        """Take all adapters: a replica adds them to the weights of the base."""

    @staticmethod
    def in_flight_obstacle(config: GenerationConfig) -> str | None:
        """None: weights are replaced between two tokens."""
        return None

    @staticmethod
    def frees_memory(config: GenerationConfig, *, on_gpu: bool) -> bool:
        """Whether `release_memory` frees anything: the cache, wherever it runs."""
        return True
