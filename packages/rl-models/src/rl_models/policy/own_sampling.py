"""Sampling of a training policy with its own weights, in its own workers."""

from __future__ import annotations

from typing import Any

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.generation.noise import derive_seeds
from rl_models.generation.row_checks import columns_to_sample
from rl_models.generation.sampling import check_sampling_params
from rl_models.policy.head_checks import check_lm_head
from rl_models.policy.row_sharding import split_rows
from rl_models.policy.text_rows import TextRows, has_texts
from rl_models.policy.training_ranks import TrainingRanks
from rl_models.policy.weight_versions import WeightVersions
from rl_models.training.worker_sampler import (
    DEFAULT_NEW_TOKENS,
    sampling_config,
    shares_weights,
)
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)

__all__ = ["OwnSampling"]


class OwnSampling:
    """Has the training workers sample.

    Args:
        ranks: The workers.
        versions: Versions of the weights.
    """

    def __init__(self, ranks: TrainingRanks, versions: WeightVersions) -> None:
        self._ranks = ranks
        self._versions = versions
        self._num_calls = 0
        self._shares_weights = shares_weights(ranks.config)
        self.holds_cache = False
        """Whether the workers keep a cache of tokens for the next call."""
        tokenizer = ranks.config.tokenizer
        self._texts = TextRows(
            tokenizer.name or ranks.config.model_name, tokenizer.chat_template
        )

    def generate(
        self,
        data: GenerationInput,
        greedy: bool,
        sampling: SamplingParams | None,
    ) -> GenerationOutput:
        """Sample one continuation per row; see `TrainingPolicy.generate`."""
        check_lm_head(self._ranks.config, "generate")
        if sampling is not None:
            check_sampling_params(sampling)

        def generate(
            rows: GenerationInput,
        ) -> GenerationOutput:
            return self._sample(columns_to_sample(rows), greedy, sampling)

        return self._texts.sample(data, generate) if has_texts(data) else generate(data)

    def _sample(
        self,
        rows: GenerationInput,
        greedy: bool,
        sampling: SamplingParams | None,
    ) -> GenerationOutput:
        sampling = self._with_limit(sampling, int(rows["input_lengths"].max()))
        if "seeds" not in rows:
            seed = sampling_config(self._ranks.config).seed
            rows["seeds"] = derive_seeds(seed, self._num_calls, rows.size)
        self._num_calls += 1
        # The policy's own samples carry its own number, so it is its name for itself.
        self._versions.hand_out(self._versions.present)
        self.holds_cache = True
        # A copy of the weights is whole on each rank, so every rank gets rows of its
        # own. The trainer's weights are not: ranks that hold a model together then
        # sample the same rows.
        ranks, shared = self._ranks, self._shares_weights
        num_parts = ranks.data_parallel_size if shared else ranks.num_ranks
        parts = split_rows(rows["input_ids"].cpu().numpy(), num_parts)
        # Ranks without rows are called too: they take part in gathering weights.
        shares = [rows.slice(a, b) if b > a else None for a, b in parts]
        settings: dict[str, Any] = {
            "version": self._versions.present,
            "greedy": greedy,
            "sampling": sampling,
        }
        if shared:
            results = ranks.call_sharded("generate", shares, **settings)
        else:
            results = ranks.call_each("generate", shares, **settings)
        outputs = [output for output, _ in results if output is not None]
        if len(outputs) == 1:
            only: GenerationOutput = outputs[0]
            return only
        pads = {"output_ids": results[0][1], "token_versions": -1}
        return BatchedDataDict.from_batches(outputs, pad_value_dict=pads)

    def _with_limit(
        self, sampling: SamplingParams | None, longest: int
    ) -> SamplingParams | None:
        """Limit answers to the room that rows leave, if no setting limits them."""
        is_bound = sampling is not None and sampling.max_new_tokens is not None
        if is_bound or self._ranks.config.generation is not None:
            return sampling
        limit = max(1, min(DEFAULT_NEW_TOKENS, self._ranks.config.row_limit - longest))
        chosen = sampling or SamplingParams()
        return SamplingParams(
            chosen.temperature, chosen.top_p, chosen.top_k, max_new_tokens=limit
        )
