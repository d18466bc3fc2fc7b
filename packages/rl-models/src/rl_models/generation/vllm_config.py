"""Section `policy.generation.vllm`: the settings of the vLLM engine of each replica."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from rl_distributed.config import Config

__all__ = ["VllmConfig"]

# What has a place of its own, here or in the sections around it.
_OWN_KEYS = {
    "async_scheduling": "vllm.async_engine",
    "block_size": "vllm.block_size",
    "data_parallel_size": "generation.num_replicas",
    "distributed_executor_backend": "vllm.tensor_parallel_size",
    "dtype": "generation.precision",
    "enable_lora": "policy.lora.sync",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enable_sleep_mode": "vllm.enable_sleep_mode",
    "enforce_eager": "vllm.enforce_eager",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "hf_overrides": "policy.hf_config_overrides",
    "kv_cache_memory_bytes": "vllm.kv_cache_gib",
    "load_format": "vllm.load_format",
    "lora_target_modules": "policy.lora.target_modules",
    "max_lora_rank": "policy.lora.r",
    "max_model_len": "generation.max_context_length",
    "max_num_batched_tokens": "vllm.max_num_batched_tokens",
    "max_num_seqs": "vllm.max_num_seqs",
    "model": "policy.model_name",
    "seed": "generation.seed",
    "tensor_parallel_size": "vllm.tensor_parallel_size",
    "tokenizer": "policy.tokenizer.name",
}
# What log-probs and weight updates rest on.
_FIXED_KEYS = (
    "generation_config",
    "logprobs_mode",
    "pipeline_parallel_size",
    "skip_tokenizer_init",
    "worker_extension_cls",
)


class VllmConfig(Config):
    """Section `policy.generation.vllm`: the vLLM engine of each replica."""

    async_engine: bool = False
    """`AsyncLLM` in place of `LLM`: weights can be updated while rows are sampled. Its
    engine is a process of its own, which takes longer to start."""
    tensor_parallel_size: int = Field(1, gt=0)
    """Workers, each with a bundle of the cluster, that hold the model of one replica
    together; it must divide the bundles, and the heads of the model."""
    enforce_eager: bool | None = None
    """Run the model's layers without compilation and CUDA graphs; null: on a CPU."""
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    """Share of a GPU's memory for weights and cache together; a CPU does not use it."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Size of the key-value cache; null: 1 on a CPU, what the share leaves on a GPU."""
    block_size: int | None = Field(None, gt=0)
    """Tokens in a block of the cache; null: vLLM's choice (128 on a CPU)."""
    max_num_seqs: int = Field(256, gt=0)
    """Rows that a replica decodes at once; further ones wait in its queue."""
    max_num_batched_tokens: int | None = Field(None, gt=0)
    """Tokens that go through the model in one step; null: vLLM's choice."""
    enable_prefix_caching: bool = True
    """Compute a shared beginning of prompts once."""
    enable_sleep_mode: bool = False
    """On GPUs: `finish_generation`, which trainers on the same devices call, frees
    weights and cache; an update and `generate` take them again. A CPU has no such
    mode."""
    stall_limit_s: float | None = Field(None, gt=0)
    """Seconds without the end of a step, while there are rows to sample, after which an
    engine is considered hung;
    null: 6 s (on a GPU, which may compile something new at any time, 60 s), or five
    times its slowest step so far if that is more. The first eight
    steps have `start_deadline_s`; on a CPU, time in which the engine is seen to compute
    counts for a tenth."""
    load_format: str = "auto"
    """How the initial weights are read, a name that vLLM knows; auto: from the model
    folder, or not at all where a trainer sends them before the first row."""
    log_level: str = Field("ERROR", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    """Lines below this level are left out of vLLM's log."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, by their names there."""

    @field_validator("engine_args")
    @classmethod
    def _check_engine_args(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in _OWN_KEYS:
                raise ValueError(
                    f"engine_args must not hold {name!r}: set {_OWN_KEYS[name]}"
                )
            if name in _FIXED_KEYS:
                raise ValueError(
                    f"engine_args must not hold {name!r}: log-probs and weight updates "
                    "rest on the value that is set already"
                )
        return value

    @model_validator(mode="after")
    def _check_sleep(self) -> VllmConfig:
        if self.enable_sleep_mode and self.async_engine:
            raise ValueError(
                "enable_sleep_mode must be false with async_engine: rows may be in the "
                "engine at any time; got true for both"
            )
        return self
