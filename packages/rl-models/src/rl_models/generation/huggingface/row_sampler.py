"""`RowSampler`: from rows of a batch to continued rows, by any decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface.decoder import Decoder
from rl_models.generation.huggingface.engine import (
    Continuations,
    OnStep,
    SamplingRequest,
    sample_batch,
)
from rl_models.generation.huggingface.stopping import StopStrings, StopTokens
from rl_models.generation.huggingface.weight_turns import WeightTurns
from rl_models.generation.noise import derive_seeds
from rl_models.generation.rows import check_rows, stop_strings_of
from rl_models.generation.sampling import check_sampling_params
from rl_models.tokens.tokenizer import pad_token_id
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)

__all__ = ["RowSampler"]

IntArray = npt.NDArray[np.int64]

# Above every version.
_NEWEST = np.iinfo(np.int64).max


class RowSampler:
    """Continues rows with a model that decodes.

    Args:
        config: Limits and default sampling parameters.
        decoder: The model.
        tokenizer: The model's tokenizer, for stop strings.
        stop_ids: Default tokens that end a text.
        context_length: Longest row of the model, unless the config has a shorter one;
            None: any.
        device: The model's device.
        turns: The model's weights.
    """

    def __init__(
        self,
        config: GenerationConfig,
        decoder: Decoder,
        tokenizer: Any,
        stop_ids: Sequence[int],
        context_length: int | None,
        device: torch.device,
        turns: WeightTurns,
    ) -> None:
        self._config, self._device, self._turns = config, device, turns
        self.decoder = decoder
        """The model."""
        self.pad_token_id = pad_token_id(tokenizer)
        """Token that pads rows."""
        self.context_length = config.max_context_length or context_length
        """Longest row, prompt and answer together; None: any."""
        chosen = stop_ids if config.stop_token_ids is None else config.stop_token_ids
        self._stop_tokens = StopTokens(chosen, device)
        self._stop_strings = StopStrings(tokenizer)
        self._num_calls = 0

    def sample(
        self,
        data: GenerationInput,
        greedy: bool,
        sampling: SamplingParams | None,
        on_step: OnStep | None = None,
    ) -> GenerationOutput:
        """Continue every row.

        Args:
            data: Rows; without a column `seeds` the noise comes from `config.seed` and
                the number of calls so far.
            greedy: Take the most likely token.
            sampling: Settings of this call; None takes those of the config.
            on_step: Watches the rows while they are sampled.
        """
        params = sampling or self._config.sampling_params()
        check_sampling_params(params)
        request = self._request(data, params, greedy, on_step)
        # Counted only for valid requests; part of the noise of rows without seeds.
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
        limit = params.max_new_tokens or self._config.max_new_tokens
        check_rows(input_ids, lengths, limit, self.context_length)
        seeds = data.get("seeds")
        if seeds is None:
            seeds = derive_seeds(self._config.seed, self._num_calls, len(lengths))
        strings = stop_strings_of(data, self._config.stop_strings)
        return SamplingRequest(
            input_ids, lengths, seeds, strings, params, limit, greedy, on_step
        )

    def _sample(self, request: SamplingRequest) -> list[tuple[IntArray, Continuations]]:
        """Return row numbers and continuations, in batches within the limits."""
        results = []
        size = self._config.max_batch_size
        for rows in self._batches(request.lengths):
            part = request if len(rows) == len(request.lengths) else request.rows(rows)
            sampled = sample_batch(
                self.decoder,
                part,
                self._stop_tokens,
                self._stop_strings,
                self._device,
                size if self.decoder.mixes_lengths else None,
                self._turns,
            )
            results.append((rows, sampled))
        return results

    def _batches(self, lengths: IntArray) -> list[IntArray]:
        if not len(lengths):
            return []
        if self.decoder.mixes_lengths:
            # One batch, in which rows take the places of those that have finished.
            return [np.arange(len(lengths))]
        size = self._config.max_batch_size or len(lengths)
        # Without padding, which a recurrent state must not see.
        groups = (np.flatnonzero(lengths == length) for length in np.unique(lengths))
        return [
            group[start : start + size]
            for group in groups
            for start in range(0, len(group), size)
        ]

    def _output(
        self,
        request: SamplingRequest,
        parts: list[tuple[IntArray, Continuations]],
    ) -> GenerationOutput:
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
        oldest = np.zeros(num_rows, dtype=np.int64)
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
            versions_B_T = sampled.versions_T_B.T
            versions.view(-1)[target] = torch.from_numpy(versions_B_T[real])
            oldest[rows] = np.where(real, versions_B_T, _NEWEST).min(1)
        return BatchedDataDict(
            {
                "output_ids": output_ids,
                "generation_lengths": torch.from_numpy(new_lengths),
                "unpadded_sequence_lengths": torch.from_numpy(totals),
                "logprobs": logprobs,
                "truncated": torch.from_numpy(truncated),
                "weight_version": torch.from_numpy(oldest),
                "token_versions": versions,
            }
        )
