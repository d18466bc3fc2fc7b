"""Sampling inside a training worker, with the weights that it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rl_distributed.errors import ConfigError, RegistryError
from rl_models.config import PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.generation.traits import get_generation_traits
from rl_models.interfaces import TrainingBackend
from rl_models.registry import get_generation_backend
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DEFAULT_NEW_TOKENS",
    "WorkerSampler",
    "sampling_config",
    "shares_weights",
]

DEFAULT_NEW_TOKENS = 128
"""Longest answer of a policy whose config has no section `generation`."""


def sampling_config(config: PolicyConfig) -> GenerationConfig:
    """Return the config with which a policy samples by itself.

    The engine is the section's, if it samples in the workers of the training backend;
    otherwise that of the backend `huggingface`, which can share a process with
    training. It computes in the precision of training.

    Args:
        config: The policy's config.
    """
    section = config.generation or GenerationConfig(max_new_tokens=DEFAULT_NEW_TOKENS)
    backend = section.backend if shares_weights(config) else "huggingface"
    options = section.backend_options if section.backend == backend else {}
    return section.model_copy(
        update={
            "backend": backend,
            "precision": config.precision,
            "backend_options": options,
        }
    )


def shares_weights(config: PolicyConfig) -> bool:
    """Whether the generation backend samples in the workers that train.

    Args:
        config: The policy's config.

    Raises:
        ConfigError: It does so in workers of another training backend.
    """
    section = config.generation
    if section is None or section.backend == "auto":
        return False
    try:
        home = get_generation_traits(section.backend).samples_in
    except RegistryError:
        # A backend that the driver has registered in code is unknown in a training
        # worker. It samples in replicas, and the driver has checked its name.
        return False
    if home not in (None, config.backend):
        raise ConfigError(
            f"policy.generation.backend {section.backend!r} samples in the workers of "
            f"the training backend {home!r}: got policy.backend {config.backend!r}; "
            f"set policy.backend={home}, or another generation backend"
        )
    return home is not None


class WorkerSampler:
    """Decodes with the weights of the training backend beside it.

    A generation backend that samples in the trainer's workers gets the trainer. Any
    other needs whole weights in its own order, so it has a copy, which is made by the
    first call and filled again by the first one after the weights have changed. Filling
    gathers sharded weights: all ranks must call it the same number of times, if need be
    without rows.

    Args:
        config: `PolicyConfig.to_dict()`.
        trainer: The training backend; None before there is one.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        trainer: TrainingBackend | None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._backend: Any = None
        self._is_stale = True

    def mark_stale(self) -> None:
        """Say that the weights have changed."""
        self._is_stale = True

    def generate(
        self,
        data: GenerationInput | None,
        version: int,
        greedy: bool,
        sampling: SamplingParams | None,
    ) -> tuple[GenerationOutput | None, int]:
        """Continue this rank's rows.

        Args:
            data: The rows; None if this rank has none.
            version: Number of the present weights.
            greedy: See `GenerationInterface.generate`.
            sampling: See `GenerationInterface.generate`.

        Returns:
            The continued rows, and the token that pads them.
        """
        backend = self._backend or self._build_backend()
        if self._is_stale:
            backend.load_weights(self._weights(backend), version)
            # Only once it has weights: a backend that failed to load is made again.
            self._backend, self._is_stale = backend, False
        pad_token_id = backend.pad_token_id
        # Not earlier: this rank had to take part in gathering the weights.
        if data is None:
            return None, pad_token_id
        return backend.generate(data, greedy=greedy, sampling=sampling), pad_token_id

    def release_memory(self) -> None:
        """Free the memory of the cache."""
        if self._backend is not None:
            self._backend.release_memory()

    def close(self) -> None:
        """Drop the copy of the weights."""
        if self._backend is not None:
            self._backend.shutdown()
        # The next copy has no weights yet.
        self._backend, self._is_stale = None, True

    def _weights(self, backend: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the weights that fill the copy; none if there is no copy."""
        if backend.samples_in is not None or self._trainer is None:
            return iter(())
        return self._trainer.export_weights(backend.config.precision)

    def _build_backend(self) -> Any:
        config = PolicyConfig.from_dict(self._config)
        sampling = sampling_config(config)
        # Made on the first call, so that workers that only train start without it.
        backend = get_generation_backend(sampling.backend)()
        shared = {} if backend.samples_in is None else {"trainer": self._trainer}
        backend.setup(
            sampling.to_dict(),
            model_name=config.model_name,
            tokenizer_name=config.tokenizer.name,
            # The trainer's weights are loaded before the first row.
            load_weights=False,
            hf_config_overrides=config.hf_config_overrides,
            **shared,
        )
        backend.name = "the policy's own sampler"
        return backend
