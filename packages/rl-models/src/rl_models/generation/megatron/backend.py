"""The generation backend `megatron`, which samples with the trainer's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from transformers import GenerationConfig as SavedConfig

from rl_models.checkpoint.model_folder import folder_context_length
from rl_models.errors import GenerationError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface.decoder import Decoder
from rl_models.generation.huggingface.row_sampler import RowSampler
from rl_models.generation.huggingface.weight_turns import WeightTurns
from rl_models.generation.megatron.traits import Traits
from rl_models.tokens.tokenizer import load_tokenizer, stop_token_ids
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)

__all__ = ["DecodingTrainer", "MegatronGenerationBackend"]


class DecodingTrainer(Protocol):
    """A training backend whose model can decode."""

    device: torch.device
    """Device of the model."""

    def decoder(self) -> Decoder:
        """Return a decoder that uses the weights in training."""
        ...


class MegatronGenerationBackend(Traits):
    """Decodes on the ranks of a trainer; those of one model must be called together.

    They get the same rows, compute the same logits and draw the same noise, so that
    they agree on each token without communicating.
    """

    def __init__(self) -> None:
        self.config: GenerationConfig
        self.name = "the policy's own sampler"
        self._sampler: RowSampler
        self._turns = WeightTurns()

    def setup(
        self,
        config: Mapping[str, Any],
        *,
        model_name: str,
        tokenizer_name: str | None = None,
        trainer: DecodingTrainer | None = None,
        **context: Any,
    ) -> None:
        """Set up sampling with the trainer's model.

        Args:
            config: `GenerationConfig.to_dict()`.
            model_name: Folder or hub name of the model.
            tokenizer_name: The same for the tokenizer; None takes the model's.
            trainer: The training backend of this process.
            context: Arguments of other backends; ignored.

        Raises:
            GenerationError: There is no trainer.
        """
        if trainer is None:
            raise GenerationError(
                "the generation backend 'megatron' samples with the weights of a "
                "trainer in the same process: got none; sample by a policy with "
                "policy.backend=megatron"
            )
        self.config = GenerationConfig.from_dict(
            dict(config), source="policy.generation"
        )
        tokenizer = load_tokenizer(tokenizer_name or model_name)
        self._sampler = RowSampler(
            self.config,
            trainer.decoder(),
            tokenizer,
            stop_token_ids(tokenizer, _saved_config(model_name)),
            folder_context_length(model_name),
            trainer.device,
            self._turns,
        )

    def generate(
        self,
        data: GenerationInput,
        *,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
    ) -> GenerationOutput:
        """Continue every row; see `GenerationBackend.generate`."""
        return self._sampler.sample(data, greedy, sampling)

    @property
    def weight_version(self) -> int:
        """Version of the trainer's present weights."""
        return self._turns.version

    @property
    def pad_token_id(self) -> int:
        """Token that pads rows."""
        return self._sampler.pad_token_id

    def load_weights(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int
    ) -> int:
        """Record the version of the trainer's present weights.

        Raises:
            GenerationError: There are tensors, although the weights are the trainer's.
        """
        # A loop only to see whether there is a first tensor.
        for name, _ in tensors:
            raise GenerationError(
                f"{self.name} samples with the trainer's weights and takes no others: "
                f"got {name}"
            )
        self._turns.version = version
        return version

    def release_memory(self) -> None:
        """Free the cache's memory; the next call allocates it again."""
        self._sampler.decoder.release()

    def shutdown(self) -> None:
        """Free the cache's memory: the model is the trainer's."""
        self._sampler.decoder.release()


def _saved_config(model_name: str) -> SavedConfig | None:
    """Return the model's saved generation config, which may list more end tokens."""
    try:
        return SavedConfig.from_pretrained(model_name)
    except OSError:  # There is none.
        return None
