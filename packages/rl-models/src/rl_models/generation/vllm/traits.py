"""Traits of the backend `vllm` for the driver, without vLLM and torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_models.generation.config import GenerationConfig
from rl_models.generation.traits import GenerationTraits
from rl_models.generation.vllm.adapter_args import check_adapter
from rl_models.generation.vllm.engine_args import (
    check_engine_config,
    engine_variables,
)
from rl_models.generation.vllm.model_shards import check_shards
from rl_models.lora_config import LoRAConfig

__all__ = ["Traits"]

# Calls of `generate` whose rows an `AsyncLLM` may batch together.
_CALLS_AT_ONCE = 16


class Traits(GenerationTraits):
    """Traits of the backend that differ from the defaults."""

    worker_class = "rl_models.generation.vllm.worker.VllmGenerationWorker"
    """Worker class that hosts this backend; its environment provides vLLM."""

    @staticmethod
    def check_config(config: GenerationConfig, *, on_gpu: bool) -> None:
        """Refuse what a worker of a group cannot do, before a process is started.

        Raises:
            ConfigError: A setting that has no effect, or that is not supported.
        """
        check_engine_config(config, on_gpu=on_gpu)

    @staticmethod
    def check_model(config: GenerationConfig, model_config: Mapping[str, Any]) -> None:
        """Refuse a model that cannot be cut into shards, by its `config.json`.

        Raises:
            ConfigError: A number of heads or columns is not divisible.
        """
        check_shards(config.vllm.tensor_parallel_size, model_config)

    @staticmethod
    def check_adapter(
        config: GenerationConfig,
        lora: LoRAConfig,
        model_config: Mapping[str, Any],
        *,
        on_gpu: bool,
    ) -> None:
        """Refuse adapters that the engine cannot compute with.

        Raises:
            ConfigError: A rank, a family of models or a data type that it cannot take.
        """
        check_adapter(config, lora, model_config, on_gpu=on_gpu)

    @staticmethod
    def workers_per_replica(config: GenerationConfig) -> int:
        """Workers that hold one model together."""
        return config.vllm.tensor_parallel_size

    @staticmethod
    def process_variables(config: GenerationConfig, *, on_gpu: bool) -> dict[str, str]:
        """Environment variables of the process of a replica."""
        return engine_variables(config, on_gpu=on_gpu)

    @staticmethod
    def frees_memory(config: GenerationConfig, *, on_gpu: bool) -> bool:
        """Return whether `release_memory` frees anything; on a CPU it cannot."""
        return on_gpu and config.vllm.enable_sleep_mode

    @staticmethod
    def calls_at_once(config: GenerationConfig) -> int:
        """Return the number of calls that one replica takes at a time."""
        return _CALLS_AT_ONCE if config.vllm.async_engine else 1

    @staticmethod
    def in_flight_obstacle(config: GenerationConfig) -> str | None:
        """Return why weights cannot be loaded while rows are sampled."""
        if config.vllm.async_engine:
            return None
        return (
            "policy.generation.vllm.async_engine=false loads weights between two calls "
            "only: set it to true"
        )
