"""What the backend `megatron` tells the driver, without what it samples with."""

from __future__ import annotations

from rl_distributed.errors import ConfigError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.traits import GenerationTraits

__all__ = ["Traits"]


class Traits(GenerationTraits):
    """It has no workers of its own."""

    samples_in = "megatron"

    @staticmethod
    def check_config(config: GenerationConfig, *, on_gpu: bool) -> None:
        """Refuse to be started as replicas.

        Raises:
            ConfigError: Always: this is asked of what has workers of its own.
        """
        raise ConfigError(
            "generation.backend megatron samples in the workers that train, and cannot "
            "be started by itself: use huggingface or vllm here, or train with "
            "policy.backend=megatron"
        )
