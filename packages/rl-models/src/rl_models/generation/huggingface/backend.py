"""The generation backend `huggingface`, as one replica hosts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_distributed.transfer.manifest import Manifest
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface.engine import (
    OnStep,
)
from rl_models.generation.huggingface.loading import load_for_sampling
from rl_models.generation.huggingface.row_sampler import RowSampler
from rl_models.generation.huggingface.traits import Traits
from rl_models.generation.huggingface.weight_turns import WeightTurns
from rl_models.lora_config import LoRAConfig
from rl_models.registry import register_generation_backend
from rl_models.tokens.tokenizer import load_tokenizer, stop_token_ids
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)
from rl_models.weights.adapters import MergedAdapter
from rl_models.weights.loading import changed_tensors, load_tensors, loaded_tensors

__all__ = ["HuggingFaceGenerationBackend"]

IntArray = npt.NDArray[np.int64]


@register_generation_backend("huggingface")
class HuggingFaceGenerationBackend(Traits):
    """Batched sampling with any Hugging Face causal language model."""

    def __init__(self) -> None:
        self.config: GenerationConfig
        self.model: Any = None
        self.tokenizer: Any = None
        self.name = "replica 0"
        self._sampler: RowSampler
        self._turns = WeightTurns()
        self._adapter: MergedAdapter | None = None

    def setup(
        self,
        config: Mapping[str, Any],
        *,
        model_name: str,
        tokenizer_name: str | None = None,
        load_weights: bool = True,
        hf_config_overrides: Mapping[str, Any] | None = None,
        replica: int = 0,
        adapter: LoRAConfig | None = None,
        **context: Any,
    ) -> None:
        """Load the model and its tokenizer.

        Args:
            config: `GenerationConfig.to_dict()`. Of `backend_options`, `fused: false`
                keeps the model's own layers instead of the fused ones.
            model_name: Folder or hub name of the model.
            tokenizer_name: The same for the tokenizer; None takes the model's.
            load_weights: False refuses to generate before the first weight update.
            hf_config_overrides: Fields of the model's `config.json` to replace.
            replica: Number of this replica, for messages.
            adapter: Weights are sent as a base and such adapters, which are merged
                here; None: they are sent merged.
            context: Arguments of other backends; ignored.
        """
        self.config = GenerationConfig.from_dict(
            dict(config), source="policy.generation"
        )
        self.name = f"generation replica {replica}"
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = load_tokenizer(tokenizer_name or model_name)
        loaded = load_for_sampling(
            model_name,
            self.config.precision,
            hf_config_overrides,
            self.device,
            fused=bool(self.config.backend_options.get("fused", True)),
        )
        self.model = loaded.model
        if adapter is not None:
            self._adapter = MergedAdapter(self.model, adapter.scale, self.name)
        self._turns = WeightTurns(
            has_weights=load_weights,
            call_deadline_s=self.config.call_deadline_s,
            update_deadline_s=self.config.weight_sync.deadline_s,
        )
        self._sampler = RowSampler(
            self.config,
            loaded.decoder,
            self.tokenizer,
            stop_token_ids(self.tokenizer, loaded.generation_config),
            loaded.context_length,
            self.device,
            self._turns,
        )

    def generate(
        self,
        data: GenerationInput,
        *,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
        on_step: OnStep | None = None,
    ) -> GenerationOutput:
        """Continue every row; calls of several threads come one after the other.

        Args:
            data: Rows; without a column `seeds` the noise comes from `config.seed` and
                the number of calls so far.
            greedy: Take the most likely token; log-probs are then those at temperature
                1 without top-k and top-p.
            sampling: Settings of this call; None takes those of the config.
            on_step: Watches the rows while they are sampled.

        Raises:
            GenerationError: There are no weights, or an update during the call failed.
        """
        with self._turns.call(self.name):
            return self._sampler.sample(data, greedy, sampling, on_step)

    @property
    def weight_version(self) -> int:
        """Version of the present weights."""
        return self._turns.version

    @property
    def pad_token_id(self) -> int:
        """Token that pads rows."""
        return self._sampler.pad_token_id

    @property
    def context_length(self) -> int | None:
        """Longest row, prompt and answer together; None: any."""
        return self._sampler.context_length

    def load_weights(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int
    ) -> int:
        """Copy every tensor into the model, and serve it as `version`.

        In a thread beside `generate`, between two tokens: rows in flight go on with the
        new weights. The keys and values of their earlier tokens stay as the old weights
        computed them.
        """
        if self._turns.is_called:
            # Received first, which takes memory for a copy: rows go on meanwhile, and a
            # stream that turns out to be damaged has changed nothing.
            tensors = iter([(name, tensor.clone()) for name, tensor in tensors])
        with self._turns.update(version):
            if self._adapter is None:
                load_tensors(self.model, tensors, receiver=self.name)
            else:
                self._adapter.load(tensors)
            self._sampler.decoder.refresh()
        return version

    def changed_weights(self, manifest: Manifest) -> list[str]:
        """Return the names of tensors that differ from a manifest."""
        if self._adapter is not None:
            return changed_tensors(manifest, self._adapter.held())
        return changed_tensors(manifest, loaded_tensors(self.model))

    def release_memory(self) -> None:
        """Free the cache's memory; the next call allocates it again."""
        self._sampler.decoder.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        """Drop the model."""
        if self.model is not None:
            self._sampler.decoder.release()
        self.model = self._adapter = None
