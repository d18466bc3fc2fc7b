"""What the backend `huggingface` tells the driver, without what it samples with."""

from __future__ import annotations

from rl_models.generation.config import GenerationConfig
from rl_models.generation.traits import GenerationTraits

__all__ = ["Traits"]


class Traits(GenerationTraits):
    """What the backend asks of its workers; for the rest the defaults hold."""

    @staticmethod
    def frees_memory(config: GenerationConfig, *, on_gpu: bool) -> bool:
        """Whether `release_memory` frees anything: the cache, wherever it runs."""
        return True
