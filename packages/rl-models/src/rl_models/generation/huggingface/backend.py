"""The generation backend `huggingface`: what one replica hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.transfer.manifest import Manifest
from rl_models.errors import GenerationError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface.decoder import Decoder
from rl_models.generation.huggingface.engine import (
    Continuations,
    OnStep,
    SamplingRequest,
    sample_batch,
)
from rl_models.generation.huggingface.loading import load_for_sampling
from rl_models.generation.huggingface.stopping import StopStrings, StopTokens
from rl_models.generation.noise import derive_seeds
from rl_models.generation.rows import check_rows, stop_strings_of
from rl_models.generation.sampling import check_sampling_params
from rl_models.registry import register_generation_backend
from rl_models.tokens.tokenizer import load_tokenizer, pad_token_id, stop_token_ids
from rl_models.types import (
    GenerationDatumSpec,
    GenerationOutputSpec,
    SamplingParams,
)
from rl_models.weights.loading import changed_tensors, load_tensors, loaded_tensors

__all__ = ["HuggingFaceGenerationBackend"]

IntArray = npt.NDArray[np.int64]


@register_generation_backend("huggingface")
class HuggingFaceGenerationBackend:
    """Batched sampling with any Hugging Face causal language model."""

    def __init__(self) -> None:
        self.config: GenerationConfig
        self.model: Any = None
        self.tokenizer: Any = None
        self.weight_version = 0
        self.name = "replica 0"
        self.pad_token_id = 0
        self._decoder: Decoder
        self._has_weights = True
        self._num_calls = 0

    def setup(
        self,
        config: Mapping[str, Any],
        *,
        model_name: str,
        tokenizer_name: str | None = None,
        load_weights: bool = True,
        hf_config_overrides: Mapping[str, Any] | None = None,
        replica: int = 0,
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
            context: What other backends need.
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
        self.model, self._decoder = loaded.model, loaded.decoder
        self._has_weights = load_weights
        self.pad_token_id = pad_token_id(self.tokenizer)
        stop_ids = self.config.stop_token_ids
        if stop_ids is None:
            stop_ids = stop_token_ids(self.tokenizer, loaded.generation_config)
        self._stop_tokens = StopTokens(stop_ids, self.device)
        self._stop_strings = StopStrings(self.tokenizer)
        self._context = self.config.max_context_length or loaded.context_length

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        *,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
        on_step: OnStep | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Continue every row.

        Args:
            data: Rows; without a column `seeds` the noise comes from `config.seed` and
                the number of calls so far.
            greedy: Take the best token; log-probs are then those at temperature 1
                without top-k and top-p.
            sampling: Settings of this call; None takes those of the config.
            on_step: Watches the rows while they are sampled.
        """
        if not self._has_weights:
            raise GenerationError(
                f"{self.name} was started without weights, or its last update failed. "
                "Call WeightSynchronizer.sync_weights() before generate()."
            )
        params = sampling or self.config.sampling_params()
        check_sampling_params(params)
        request = self._request(data, params, greedy, on_step)
        self._num_calls += 1
        return self._output(request, self._sample(request))

    def _request(
        self,
        data: Mapping[str, Any],
        params: SamplingParams,
        greedy: bool,
        on_step: OnStep | None,
    ) -> SamplingRequest:
        input_ids: torch.Tensor = data["input_ids"].cpu()
        lengths: IntArray = data["input_lengths"].cpu().numpy().astype(np.int64)
        limit = params.max_new_tokens or self.config.max_new_tokens
        check_rows(input_ids, lengths, limit, self._context)
        seeds = data.get("seeds")
        if seeds is None:
            seeds = derive_seeds(self.config.seed, self._num_calls, len(lengths))
        strings = stop_strings_of(data, self.config.stop_strings)
        return SamplingRequest(
            input_ids, lengths, seeds, strings, params, limit, greedy, on_step
        )

    def _sample(self, request: SamplingRequest) -> list[tuple[IntArray, Continuations]]:
        """Row numbers and continuations, in as many batches as the limits ask for."""
        results = []
        for rows in self._batches(request.lengths):
            part = request if len(rows) == len(request.lengths) else request.rows(rows)
            sampled = sample_batch(
                self._decoder, part, self._stop_tokens, self._stop_strings, self.device
            )
            results.append((rows, sampled))
        return results

    def _batches(self, lengths: IntArray) -> list[IntArray]:
        everything = np.arange(len(lengths))
        if not len(lengths):
            return []
        if self._decoder.mixes_lengths:
            groups = [everything]
        else:
            groups = [
                np.flatnonzero(lengths == length) for length in np.unique(lengths)
            ]
        size = self.config.max_batch_size or len(lengths)
        if len(lengths) > size and self._decoder.mixes_lengths:
            # Rows of like length together; equal prompts stay side by side.
            groups = [np.argsort(-lengths, kind="stable")]
        return [
            group[start : start + size]
            for group in groups
            for start in range(0, len(group), size)
        ]

    def _output(
        self, request: SamplingRequest, parts: list[tuple[IntArray, Continuations]]
    ) -> BatchedDataDict[GenerationOutputSpec]:
        num_rows, input_width = request.input_ids.shape
        new_lengths = np.zeros(num_rows, dtype=np.int64)
        truncated = np.zeros(num_rows, dtype=bool)
        for rows, sampled in parts:
            new_lengths[rows] = sampled.lengths
            truncated[rows] = sampled.truncated
        totals = request.lengths + new_lengths
        width = max(input_width, int(totals.max(initial=0)))
        output_ids = torch.full((num_rows, width), self.pad_token_id)
        logprobs = torch.zeros(num_rows, width)
        versions = torch.full((num_rows, width), -1)
        prompt = np.arange(input_width) < request.lengths[:, None]
        mask = torch.from_numpy(prompt)
        output_ids[:, :input_width][mask] = request.input_ids[mask]
        for rows, sampled in parts:
            steps = np.arange(len(sampled.tokens_T_B))
            real = steps < sampled.lengths[:, None]
            places = (rows * width + request.lengths[rows])[:, None] + steps
            target = torch.from_numpy(places[real])
            keep = torch.from_numpy(real)
            output_ids.view(-1)[target] = sampled.tokens_T_B.t()[keep]
            logprobs.view(-1)[target] = sampled.logprobs_T_B.t()[keep]
            versions.view(-1)[target] = self.weight_version
        return BatchedDataDict(
            {
                "output_ids": output_ids,
                "generation_lengths": torch.from_numpy(new_lengths),
                "unpadded_sequence_lengths": torch.from_numpy(totals),
                "logprobs": logprobs,
                "truncated": torch.from_numpy(truncated),
                "weight_version": torch.full((num_rows,), self.weight_version),
                "token_versions": versions,
            }
        )

    @property
    def context_length(self) -> int | None:
        """Longest row, prompt and answer together; None: any."""
        return self._context

    def load_weights(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int
    ) -> int:
        """Copy every tensor into the model, and serve it as `version`."""
        self._has_weights = False
        load_tensors(self.model, tensors, receiver=self.name)
        self._decoder.refresh()
        self._has_weights = True
        self.weight_version = version
        return version

    def changed_weights(self, manifest: Manifest) -> list[str]:
        """Tensors of a manifest that the model holds otherwise, by name."""
        return changed_tensors(manifest, loaded_tensors(self.model))

    def release_memory(self) -> None:
        """Free the cache's memory; the next call takes it again."""
        self._decoder.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        """Drop the model."""
        if self.model is not None:
            self._decoder.release()
        self.model = None
