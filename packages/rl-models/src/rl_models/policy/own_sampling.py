"""How a training policy samples with its own weights, in its own workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError
from rl_models.config import PolicyConfig
from rl_models.generation.noise import derive_seeds
from rl_models.generation.row_checks import columns_to_sample
from rl_models.generation.sampling import check_sampling_params
from rl_models.policy.head_checks import check_lm_head
from rl_models.policy.row_sharding import split_rows
from rl_models.policy.text_rows import TextRows, has_texts
from rl_models.training.worker_sampler import DEFAULT_NEW_TOKENS, sampling_config
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec, SamplingParams

__all__ = ["OwnSampling"]


class OwnSampling:
    """The part of `TrainingPolicy` that samples."""

    config: PolicyConfig
    num_ranks: int
    _weight_version: int
    _num_samplings: int
    _holds_cache: bool
    """Whether the workers keep a cache of tokens for the next call."""
    _exported: dict[int, int]
    """By version that a sampler states, the policy's own at that time."""
    _call_each: Callable[..., list[Any]]

    @property
    def weight_version(self) -> int:
        """Version of the present weights, which `generate` states of its rows.

        It begins at 0 and counts optimizer steps and checkpoints that were loaded.
        """
        return self._weight_version

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        *,
        sampling: SamplingParams | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Sample one continuation per row; see `PolicyInterface.generate`.

        The rows are shared among the training workers, each of which decodes its part
        with the engine of the generation backend `huggingface`. Nothing is sent: the
        weights are those of the last `train`. From the first call on each worker keeps
        a second copy of the weights, whole and in `policy.precision`.

        A row's sample depends on its tokens, its seed and the weights, not on the
        number of workers. Rows without a column `seeds` get seeds from the section
        `generation` and the number of calls so far. Without that section rows get 128
        new tokens at most, or what room there is, at temperature 1.

        A batch may have texts in place of tokens: see `TextRows.sample`.

        Raises:
            ConfigError: The model has a scalar head, or `sampling` is no distribution.
            BatchError: Columns are missing, or there are no rows.
            ContextLengthError: A row leaves no room for an answer.
        """
        check_lm_head(self.config, "generate")
        if sampling is not None:
            check_sampling_params(sampling)

        def generate(rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
            return self._sample(columns_to_sample(rows), greedy, sampling)

        return self._texts.sample(data, generate) if has_texts(data) else generate(data)

    def _sample(
        self, rows: BatchedDataDict[Any], greedy: bool, sampling: SamplingParams | None
    ) -> BatchedDataDict[GenerationOutputSpec]:
        sampling = self._with_limit(sampling, int(rows["input_lengths"].max()))
        if "seeds" not in rows:
            seed = sampling_config(self.config).seed
            rows["seeds"] = derive_seeds(seed, self._num_samplings, rows.size)
        self._num_samplings += 1
        self._exported[self._weight_version] = self._weight_version
        self._holds_cache = True
        parts = split_rows(rows["input_ids"].cpu().numpy(), self.num_ranks)
        results = self._call_each(
            "generate",
            [rows.slice(start, end) if end > start else None for start, end in parts],
            version=self._weight_version,
            greedy=greedy,
            sampling=sampling,
        )
        outputs = [output for output, _ in results if output is not None]
        if len(outputs) == 1:
            only: BatchedDataDict[GenerationOutputSpec] = outputs[0]
            return only
        pads = {"output_ids": results[0][1], "token_versions": -1}
        return BatchedDataDict.from_batches(outputs, pad_value_dict=pads)

    def _with_limit(
        self, sampling: SamplingParams | None, longest: int
    ) -> SamplingParams | None:
        """Bound answers by the room that rows leave, where no setting bounds them."""
        is_bound = sampling is not None and sampling.max_new_tokens is not None
        if is_bound or self.config.generation is not None:
            return sampling
        limit = max(1, min(DEFAULT_NEW_TOKENS, self.config.row_limit - longest))
        chosen = sampling or SamplingParams()
        return SamplingParams(
            chosen.temperature, chosen.top_p, chosen.top_k, max_new_tokens=limit
        )

    def _begin_versions(self) -> None:
        """Start counting with the weights that the workers have now."""
        self._weight_version = 0
        self._exported: dict[int, int] = {}
        self._num_samplings = 0
        self._holds_cache = False
        tokenizer = self.config.tokenizer
        self._texts = TextRows(
            tokenizer.name or self.config.model_name, tokenizer.chat_template
        )

    def _check_newest(self, versions: Tensor | None) -> None:
        """Refuse rows that were sampled with other weights than the present ones.

        Args:
            versions: [B] what `generate` stated; None: nothing.

        Raises:
            BatchError: They are of another version, or of a generator that has never
                got weights of this policy.
        """
        if versions is None:
            return
        for version in sorted(set(versions.tolist())):
            # What a generator calls a version is its own affair.
            own = self._exported.get(version)
            if own != self._weight_version:
                got = (
                    f"version {own}"
                    if own is not None
                    else f"version {version} of a generator that does not follow it"
                )
                raise BatchError(
                    f"policy.train(batch, rewards) takes rows that the present weights "
                    f"sampled, version {self._weight_version}: got rows of {got}; call "
                    "generator.follow(policy) once before the loop, so that its "
                    "weights are those of the policy, and train on each batch once"
                )
