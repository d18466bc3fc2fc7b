"""Traits of a generation backend, which the driver reads before a process is started.

They are declared as those of a training backend: see `rl_models.training.traits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rl_distributed.errors import ConfigError
from rl_models.backend_forms import with_defaults
from rl_models.generation.config import GenerationConfig
from rl_models.interfaces import GenerationMemory, lacking
from rl_models.lora_config import LoRAConfig
from rl_models.registry import generation_backend_described

__all__ = ["GenerationTraits", "get_generation_traits"]


class GenerationTraits:
    """The traits that a generation backend may declare, with their defaults."""

    worker_class: ClassVar[str] = "rl_models.generation.worker.GenerationWorker"
    """Path of the worker class; its environment provides the backend's imports."""

    samples_in: ClassVar[str | None] = None
    """Training backend in whose workers it samples, with their weights; None: it has
    workers of its own, which weights are sent to."""

    holds_model: ClassVar[bool] = True
    """Whether its workers hold the model, in the memory of their devices; False: it is
    elsewhere, such as in servers."""

    prompts: ClassVar[str] = "text"
    """Form of prompts for a backend of four methods: "text" or "token_ids"."""

    @staticmethod
    def check_config(config: GenerationConfig, *, on_gpu: bool) -> None:
        """Refuse settings that cannot work.

        Raises:
            ConfigError: A setting, by its key, with a remedy.
        """

    @staticmethod
    def check_model(config: GenerationConfig, model_config: Mapping[str, Any]) -> None:
        """Refuse a model that cannot be sampled from with these settings.

        Args:
            config: The generation config.
            model_config: The model's `config.json`, overrides included; not called for
                a model that is not in a folder.

        Raises:
            ConfigError: It cannot be.
        """

    @staticmethod
    def check_adapter(
        config: GenerationConfig,
        lora: LoRAConfig,
        model_config: Mapping[str, Any],
        *,
        on_gpu: bool,
    ) -> None:
        """Refuse adapters that are sent apart from the weights of their base.

        A backend that takes them overrides this, and has `setup(..., adapter=)`, which
        then gets a `LoRAConfig`.

        Args:
            config: The generation config.
            lora: The adapters.
            model_config: The model's `config.json`, overrides included; empty for a
                model that is not in a folder.
            on_gpu: Whether workers have GPUs.

        Raises:
            ConfigError: They cannot be taken.
        """
        raise ConfigError(
            "policy.lora.sync must be 'merged' with policy.generation.backend "
            f"{config.backend!r}, which takes no adapters: got {lora.sync!r}; set it "
            "to merged, or sample with the backend huggingface or vllm"
        )

    @staticmethod
    def process_variables(
        config: GenerationConfig, *, on_gpu: bool
    ) -> Mapping[str, str]:
        """Environment variables of the process of a replica."""
        return {}

    @staticmethod
    def calls_at_once(config: GenerationConfig) -> int:
        """Return the number of `generate` calls that run in one replica at a time."""
        return 1

    @staticmethod
    def in_flight_obstacle(config: GenerationConfig) -> str | None:
        """Return why weights cannot be loaded while rows are sampled; None if they can.

        A backend that can overrides this: `load_weights` is then called in a thread
        beside `generate`, rows in flight go on with the new weights, and
        `token_versions` says which weights have sampled each token.
        """
        return (
            f"policy.generation.backend {config.backend!r} loads weights between two "
            "calls only: use huggingface, or vllm with vllm.async_engine=true"
        )

    @staticmethod
    def workers_per_replica(config: GenerationConfig) -> int:
        """Return the number of workers that hold one model together.

        Each gets its `place` in the replica by `setup`.
        """
        return 1

    @classmethod
    def frees_memory(cls, config: GenerationConfig, *, on_gpu: bool) -> bool:
        """Return whether `release_memory` frees anything; if present, it is called."""
        return not lacking(cls, GenerationMemory)


def get_generation_traits(name: str) -> type[GenerationTraits]:
    """Return the traits of a generation backend, completed by the defaults.

    Raises:
        RegistryError: The name is unknown.
    """
    return with_defaults(generation_backend_described(name), GenerationTraits)
