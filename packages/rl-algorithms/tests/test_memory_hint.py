"""Settings that are suggested when memory runs out."""

from __future__ import annotations

from rl_algorithms.grpo.config import GRPOConfig
from rl_algorithms.trainers.setup.memory_hint import memory_hint
from rl_distributed.errors import WorkerDiedError
from rl_distributed.failures.worker import WorkerFailure
from rl_models.errors import GenerationError


def died(cause: str) -> WorkerDiedError:
    error = WorkerDiedError(cause)
    error.failure = WorkerFailure("policy", 0, "10.0.0.1", 7, "died", cause=cause)
    return error


def config(backend: str, **vllm: float) -> GRPOConfig:
    generation = {"max_new_tokens": 64, "backend": backend, "vllm": vllm}
    policy = {
        "model_name": "m",
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 512,
        "generation": generation,
    }
    return GRPOConfig.from_dict({"policy": policy, "cluster": {"workers_per_node": 2}})


def test_only_the_settings_that_count_are_named() -> None:
    ran_out = died("memory ran out on node 10.0.0.1 (4 of 4 GiB were in use)")
    assert memory_hint(config("huggingface"), ran_out) == (
        "To use less memory, lower some of: policy.train_micro_batch_size (2), "
        "policy.max_total_sequence_length (512), cluster.workers_per_node (2), "
        "policy.generation.max_new_tokens (64)"
    )
    hint = memory_hint(config("vllm", kv_cache_gib=3.0), ran_out)
    assert hint is not None
    assert "policy.generation.vllm.gpu_memory_utilization (0.6)" in hint
    assert hint.endswith("policy.generation.vllm.kv_cache_gib (3.0)")


def test_other_errors_may_tell_it() -> None:
    lost = died("memory ran out on node 10.0.0.1 (4 of 4 GiB were in use)")
    error = GenerationError(f"No generation replica is left: replica 0: {lost}.")
    assert memory_hint(config("huggingface"), error) is not None


def test_other_ends_have_no_hint() -> None:
    run = config("huggingface")
    assert memory_hint(run, died("it exited by itself: sys.exit(1)")) is None
    assert memory_hint(run, ValueError("memory ran out on node h")) is None
