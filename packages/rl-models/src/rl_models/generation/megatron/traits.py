"""Traits of the backend `megatron` for the driver, without Megatron-core."""

from __future__ import annotations

from rl_distributed.errors import ConfigError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.traits import GenerationTraits

__all__ = ["Traits"]


class Traits(GenerationTraits):
    """Traits of a backend without workers of its own."""

    samples_in = "megatron"

    @staticmethod
    def check_config(config: GenerationConfig, *, on_gpu: bool) -> None:
        """Refuse to be started as replicas.

        Raises:
            ConfigError: Always, because only backends with workers of their own are
                started.
        """
        raise ConfigError(
            "generation.backend megatron samples in the workers that train, and cannot "
            "be started by itself: use huggingface or vllm here, or train with "
            "policy.backend=megatron"
        )
