"""Sampling inside a training worker, with the weights that it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.config import PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.registry import get_generation_backend
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DEFAULT_NEW_TOKENS", "WorkerSampler", "sampling_config"]

DEFAULT_NEW_TOKENS = 128
"""Longest answer of a policy whose config has no section `generation`."""


def sampling_config(config: PolicyConfig) -> GenerationConfig:
    """Return how a policy samples by itself.

    The engine is always that of the backend `huggingface`, which shares a process with
    training, and computes in the precision that training computes in.

    Args:
        config: The policy's config.
    """
    section = config.generation or GenerationConfig(max_new_tokens=DEFAULT_NEW_TOKENS)
    options = section.backend_options if section.backend == "huggingface" else {}
    return section.model_copy(
        update={
            "backend": "huggingface",
            "precision": config.precision,
            "backend_options": options,
        }
    )


class WorkerSampler:
    """Decodes with the weights of the training backend beside it.

    Decoding needs the weights whole and in an order of its own, so it has a copy, which
    is made by the first call and filled again by the first one after the weights have
    changed. Filling gathers sharded weights: all ranks must sample the same number of
    times, if need be without rows.

    Args:
        config: `PolicyConfig.to_dict()`.
        export_weights: See `TrainingBackend.export_weights`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        export_weights: Callable[[str], Iterator[tuple[str, Tensor]]],
    ) -> None:
        self._config = config
        self._export_weights = export_weights
        self._backend: Any = None
        self._is_stale = True

    def mark_stale(self) -> None:
        """Say that the weights have changed."""
        self._is_stale = True

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec] | None,
        version: int,
        greedy: bool,
        sampling: SamplingParams | None,
    ) -> tuple[BatchedDataDict[GenerationOutputSpec] | None, int]:
        """Continue this rank's rows.

        Args:
            data: The rows; None where there are none for this rank.
            version: What the present weights are called.
            greedy: See `GenerationInterface.generate`.
            sampling: See `GenerationInterface.generate`.

        Returns:
            The rows continued, and the token that they are filled up with.
        """
        backend = self._backend or self._make_backend()
        if self._is_stale:
            backend.load_weights(
                self._export_weights(backend.config.precision), version
            )
            self._backend, self._is_stale = backend, False
        pad_token_id = backend.pad_token_id
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
        self._backend, self._is_stale = None, True

    def _make_backend(self) -> Any:
        config = PolicyConfig.from_dict(self._config)
        # Imported here, so that workers which only train start without it.
        backend = get_generation_backend("huggingface")()
        backend.setup(
            sampling_config(config).to_dict(),
            model_name=config.model_name,
            tokenizer_name=config.tokenizer.name,
            load_weights=False,
            hf_config_overrides=config.hf_config_overrides,
        )
        backend.name = "the policy's own sampler"
        return backend
