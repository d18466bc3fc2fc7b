"""The generation backend `vllm`, as one replica hosts it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch

from rl_distributed.errors import ConfigError
from rl_distributed.process.gc_pause import gc_paused
from rl_distributed.transfer import Manifest
from rl_models.environments import has_gpu
from rl_models.errors import GenerationError
from rl_models.generation.completions import Completion, join_rows
from rl_models.generation.config import GenerationConfig
from rl_models.generation.noise import derive_seeds
from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.rows import check_rows, stop_strings_of
from rl_models.generation.sampling import check_sampling_params
from rl_models.generation.vllm.engine import Engine
from rl_models.generation.vllm.engine_args import (
    EXTENSION,
    engine_args,
    engine_variables,
)
from rl_models.generation.vllm.engines import build_engine
from rl_models.generation.vllm.requests import build_completion, build_requests
from rl_models.generation.vllm.traits import Traits
from rl_models.lora_config import LoRAConfig
from rl_models.registry import register_generation_backend
from rl_models.tokens.tokenizer import load_tokenizer, pad_token_id, stop_token_ids
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)

__all__ = ["VllmGenerationBackend"]

# The parts of memory that vLLM's sleep mode frees, by its own names.
_MEMORY = ("weights", "kv_cache")


@register_generation_backend("vllm")
class VllmGenerationBackend(Traits):
    """Continuous batching and a paged cache by the vLLM engine.

    A row's sample depends on its seed and its tokens, as far as the model's arithmetic
    does not depend on the rows beside it; see the guide on generation backends.
    """

    def __init__(self) -> None:
        self.config: GenerationConfig
        self.tokenizer: Any = None
        self.weight_version = 0
        self.name = "replica 0"
        self.pad_token_id = 0
        self._engine: Engine | None = None
        self._has_weights = True
        self._asleep: frozenset[str] = frozenset()
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
        place: ReplicaRank | None = None,
        adapter: LoRAConfig | None = None,
        **context: Any,
    ) -> None:
        """Build the engine.

        Args:
            config: `GenerationConfig.to_dict()`.
            model_name: Folder or hub name of the model.
            tokenizer_name: The same for the tokenizer; None takes the model's.
            load_weights: False refuses to generate before the first weight update, and
                does not read the folder's weights.
            hf_config_overrides: Fields of the model's `config.json` to replace.
            replica: Number of this replica, for messages.
            place: The rank of this process in its replica; ranks wait for each other
                here.
            adapter: Weights are sent as a base and such adapters, which the engine
                computes beside the base; None: they are sent merged.
            context: Arguments of other backends; ignored.

        Raises:
            ConfigError: A setting that vLLM refuses, or that has no effect.
        """
        self.config = GenerationConfig.from_dict(
            dict(config), source="policy.generation"
        )
        self.name = f"generation replica {replica}"
        self._has_weights = load_weights
        on_gpu = has_gpu()
        arguments = engine_args(
            self.config,
            model_name=model_name,
            tokenizer_name=tokenizer_name,
            load_weights=load_weights,
            hf_config_overrides=hf_config_overrides,
            place=place,
            adapter=adapter,
            on_gpu=on_gpu,
        )
        # A worker group sets these before the process starts; a process by itself gets
        # them here, before the first import of vLLM.
        for name, value in engine_variables(self.config, on_gpu=on_gpu).items():
            os.environ.setdefault(name, value)
        self._import_engine()
        self.tokenizer = load_tokenizer(tokenizer_name or model_name)
        self.pad_token_id = pad_token_id(self.tokenizer)
        self._engine = self._build(arguments, place)
        self._stop_token_ids = self.config.stop_token_ids
        if self._stop_token_ids is None:
            self._stop_token_ids = stop_token_ids(
                self.tokenizer, _generation_config(model_name)
            )

    def _import_engine(self) -> None:
        """Import vLLM with the garbage collector paused.

        Its modules create many long-lived objects, which every collection would
        traverse.
        """
        engine = "entrypoints.llm"
        if self.config.vllm.async_engine:
            engine = "v1.engine.async_llm"
        with gc_paused():
            import_module(f"vllm.{engine}")
            import_module(EXTENSION.rpartition(".")[0])

    def _build(self, arguments: dict[str, Any], place: ReplicaRank | None) -> Engine:
        engine = self.config.vllm
        try:
            return build_engine(
                arguments,
                is_async=engine.async_engine,
                place=place,
                update_deadline_s=self.config.weight_sync.deadline_s,
            )
        # vLLM raises these for arguments that are unknown or that do not fit together.
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"vLLM refuses the settings of {self.name}: {error}. The cache is set "
                "by generation.vllm.kv_cache_gib (on a GPU also by "
                "gpu_memory_utilization), its longest row by "
                "generation.max_context_length; generation.vllm.engine_args holds "
                f"{sorted(engine.engine_args) or 'nothing'}."
            ) from error

    @property
    def engine(self) -> Engine:
        """The engine, which `setup` has built."""
        if self._engine is None:
            raise GenerationError(f"{self.name} has no engine; call setup() first.")
        return self._engine

    def generate(
        self,
        data: GenerationInput,
        *,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
    ) -> GenerationOutput:
        """Continue every row; with `async_engine` from several threads at once.

        Args:
            data: Rows; without a column `seeds` the noise comes from `config.seed` and
                the number of calls so far.
            greedy: Take the most likely token; log-probs are then those at temperature
                1 without top-k and top-p.
            sampling: Settings of this call; None takes those of the config.

        Raises:
            BatchError: Rows are no prompts, or too long.
            GenerationError: There are no weights yet, or vLLM failed.
        """
        if not self._has_weights:
            raise GenerationError(
                f"{self.name} has no weights: it was started without, or the last "
                "update failed. Call WeightSynchronizer.sync_weights() before "
                "generate()."
            )
        params = sampling or self.config.sampling_params()
        check_sampling_params(params)
        input_ids = data["input_ids"].cpu()
        lengths = data["input_lengths"].cpu().numpy().astype(np.int64)
        limit = params.max_new_tokens or self.config.max_new_tokens
        check_rows(input_ids, lengths, limit, self.engine.context_length)
        seeds = data.get("seeds")
        if seeds is None:
            seeds = derive_seeds(self.config.seed, self._num_calls, len(lengths))
        self._num_calls += 1
        requests = build_requests(
            input_ids,
            lengths,
            seeds,
            stop_strings_of(data, self.config.stop_strings),
            params,
            stop_token_ids=self._stop_token_ids or (),
            max_new_tokens=limit,
            greedy=greedy,
        )
        self.wake(*_MEMORY)
        # For tokens of which vLLM names no version. Read before sampling: an update may
        # come while rows are in an `AsyncLLM`.
        version = self.weight_version
        completions: list[Completion] = [
            build_completion(output, row, version)
            for row, output in enumerate(self.engine.sample(requests))
        ]
        return join_rows(input_ids, lengths, completions, self.pad_token_id)

    def load_weights(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int
    ) -> int:
        """Replace all weights in place and serve them as `version`.

        Args:
            tensors: All weights by their Hugging Face names; read to its end. Its
                errors are passed on.
            version: Number of these weights.

        Raises:
            WeightSyncError: Weights are missing, unknown or of another shape. Nothing
                is generated then until an update succeeds.
        """
        # The cache stays asleep: the trainer, perhaps on the same GPU, needs memory to
        # gather the weights that it sends.
        self.wake("weights")
        try:
            self.engine.load(tensors, version)
        except BaseException:
            # The model may hold some old and some new weights.
            self._has_weights = False
            raise
        self.weight_version = version
        self._has_weights = True
        return version

    def changed_weights(self, manifest: Manifest) -> list[str] | None:
        """Return the names of tensors that differ from what was sent.

        Args:
            manifest: Manifest of the tensors that were sent.

        Returns:
            Their names; None if weights are quantized or otherwise kept in a form of
            the engine's own, which cannot be compared.
        """
        self.wake("weights")
        return self.engine.changed([entry.to_json() for entry in manifest.entries])

    def release_memory(self) -> None:
        """Free the GPU's memory, with `enable_sleep_mode`; a CPU keeps its own."""
        if self.config.vllm.enable_sleep_mode and len(self._asleep) < len(_MEMORY):
            # vLLM ignores the call while a part of it is asleep already.
            self.wake(*_MEMORY)
            self.engine.sleep()
            self._asleep = frozenset(_MEMORY)

    def wake(self, *parts: str) -> None:
        """Allocate the GPU's memory again.

        Args:
            parts: Its uses: `weights`, `kv_cache`.
        """
        needed = [part for part in parts if part in self._asleep]
        if needed:
            self.engine.wake(needed)
            self._asleep -= set(needed)

    def shutdown(self) -> None:
        """End the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def _generation_config(model_name: str) -> Any:
    """Return the config in which a model's folder says how rows end."""
    import transformers  # noqa: PLC0415 - heavy

    try:
        return transformers.GenerationConfig.from_pretrained(model_name)
    except OSError:
        # A folder without `generation_config.json` has the ids in `config.json`.
        return transformers.AutoConfig.from_pretrained(model_name)
