"""Hint at the settings that reduce the memory of a run's workers."""

from __future__ import annotations

from typing import Any

from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_distributed.errors import DistributedError
from rl_distributed.failures.out_of_memory import OUT_OF_MEMORY

__all__ = ["memory_hint"]


def memory_hint(config: TrainerConfig, error: BaseException) -> str | None:
    """Name the settings to lower, if a run ended because memory ran out.

    Args:
        config: Configuration of the run.
        error: Error that ended the run.
    """
    # Only errors of ours: they have classified the death of a worker, while the words
    # could mean anything in an exception of the user's code.
    if not isinstance(error, DistributedError) or OUT_OF_MEMORY not in str(error):
        return None
    policy, cluster = config.policy, config.cluster
    settings: dict[str, Any] = {
        "policy.train_micro_batch_size": policy.train_micro_batch_size,
        "policy.max_total_sequence_length": policy.max_total_sequence_length,
        "cluster.workers_per_node": cluster.workers_per_node,
    }
    if config.sampling_cluster is not None:
        settings["generation_cluster.workers_per_node"] = (
            config.sampling_cluster.workers_per_node
        )
    generation = policy.generation
    prefix = "policy.generation"
    if generation is not None:
        settings[f"{prefix}.max_new_tokens"] = generation.max_new_tokens
    # "auto" may have become vLLM, and the hint costs nothing if it has not.
    if generation is not None and generation.backend in ("auto", "vllm"):
        vllm = generation.vllm
        settings |= {
            f"{prefix}.vllm.gpu_memory_utilization": vllm.gpu_memory_utilization,
            f"{prefix}.vllm.kv_cache_gib": vllm.kv_cache_gib,
        }
    named = ", ".join(
        f"{name} ({value})" for name, value in settings.items() if value is not None
    )
    return f"To use less memory, lower some of: {named}"
