"""Arguments of a vLLM engine and variables of its process, from the configuration.

Replicas and the HTTP server build their engines with these functions, so that all of
them sample with the same settings and take weights in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_distributed.errors import ConfigError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.vllm.adapter_args import adapter_args
from rl_models.generation.vllm_config import VllmConfig
from rl_models.lora_config import LoRAConfig

__all__ = [
    "EXTENSION",
    "check_engine_config",
    "check_temperature",
    "engine_args",
    "engine_variables",
]

EXTENSION = "rl_models.generation.vllm.extension.WeightExtension"
_EXECUTORS = "rl_models.generation.vllm.rank_executor"
_GIB = 1 << 30
_CPU_CACHE_GIB = 1.0
_SEEDS = 1 << 31
# vLLM raises lower ones to this, with a warning in its log alone.
_LEAST_TEMPERATURE = 0.01


def check_engine_config(config: GenerationConfig, *, on_gpu: bool) -> None:
    """Refuse what the engine cannot do, before a process is started.

    Args:
        config: The generation config.
        on_gpu: Whether the engine runs on GPUs.

    Raises:
        ConfigError: A setting that has no effect here, or that is not supported.
    """
    engine = config.vllm
    if config.backend_options:
        raise ConfigError(
            "generation.backend_options must be empty for the backend vllm: got "
            f"{sorted(config.backend_options)}; its settings are in generation.vllm"
        )
    if config.max_batch_size is not None:
        raise ConfigError(
            "generation.max_batch_size is not read by the backend vllm: got "
            f"{config.max_batch_size}; set generation.vllm.max_num_seqs"
        )
    for name in ("temperature", "val_temperature"):
        check_temperature(getattr(config, name), f"generation.{name}")
    if not on_gpu:
        _check_cpu(engine)


def check_temperature(value: float | None, name: str) -> None:
    """Refuse a temperature that vLLM would replace in silence.

    Raises:
        ConfigError: It is below 0.01.
    """
    if value is not None and value < _LEAST_TEMPERATURE:
        raise ConfigError(
            f"{name} must be at least {_LEAST_TEMPERATURE} with the backend vllm, "
            f"which samples at that temperature otherwise: got {value:g}; sample "
            "greedily for the most likely token"
        )


def _check_cpu(engine: VllmConfig) -> None:
    if engine.enable_sleep_mode:
        raise ConfigError(
            "generation.vllm.enable_sleep_mode must be false on a CPU, where vLLM has "
            "no such mode: got true"
        )


def engine_args(
    config: GenerationConfig,
    *,
    model_name: str | os.PathLike[str],
    tokenizer_name: str | os.PathLike[str] | None = None,
    load_weights: bool = True,
    hf_config_overrides: Mapping[str, Any] | None = None,
    place: ReplicaRank | None = None,
    adapter: LoRAConfig | None = None,
    on_gpu: bool,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`, `AsyncEngineArgs` and `LLM`.

    Args:
        config: The generation config.
        model_name: Folder or hub name of the model.
        tokenizer_name: The same for its tokenizer; None takes the model's.
        load_weights: False leaves the weights undefined until the first update.
        hf_config_overrides: Fields of the model's `config.json` to replace.
        place: The rank of this process in a tensor-parallel replica.
        adapter: The adapter that is sent apart from the weights; None: there is none.
        on_gpu: Whether the engine runs on GPUs.

    Raises:
        ConfigError: A setting that has no effect here, or that is not supported.
    """
    check_engine_config(config, on_gpu=on_gpu)
    engine = config.vllm
    load_format = engine.load_format
    if load_format == "auto" and not load_weights:
        # The first update replaces all weights, so reading them from disk would be
        # wasted.
        load_format = "dummy"
    arguments: dict[str, Any] = {
        "model": _local(model_name),
        "tokenizer": _local(tokenizer_name or model_name),
        "dtype": config.precision,
        "seed": config.seed % _SEEDS,
        "max_model_len": config.max_context_length,
        "hf_overrides": dict(hf_config_overrides or {}),
        **_parallel_args(engine, place, on_gpu),
        "enforce_eager": is_eager(engine, on_gpu),
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "block_size": engine.block_size,
        "load_format": load_format,
        "kv_cache_memory_bytes": _cache_bytes(engine, on_gpu),
        "worker_extension_cls": EXTENSION,
        # Training needs the log-probs that tokens were drawn from: at the temperature,
        # and after top-k and top-p. vLLM's default is before both.
        "logprobs_mode": "processed_logprobs",
        # Otherwise settings that the model folder recommends would become defaults.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not on_gpu:
        # After a part of a prompt vLLM rewinds the generator of a row with a seed,
        # which a CPU's generators cannot do.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = engine.gpu_memory_utilization
        arguments["enable_sleep_mode"] = engine.enable_sleep_mode
    arguments |= engine.engine_args
    return arguments | (adapter_args(adapter, arguments) if adapter else {})


def _parallel_args(
    engine: VllmConfig, place: ReplicaRank | None, on_gpu: bool
) -> dict[str, Any]:
    size = engine.tensor_parallel_size
    if size != (1 if place is None else place.size):
        raise ConfigError(
            f"generation.vllm.tensor_parallel_size must be 1 in a process by itself: "
            f"got {size}; use GenerationPolicy, which starts that many per replica"
        )
    if place is None:
        return {}
    executor = "LeadingExecutor" if engine.async_engine else "RankExecutor"
    arguments: dict[str, Any] = {
        "tensor_parallel_size": size,
        "distributed_executor_backend": f"{_EXECUTORS}.{executor}",
    }
    if on_gpu:
        # NCCL adds up in the same order on all ranks. The alternatives look for the
        # GPUs of the other ranks, which a worker does not see, or guarantee no order,
        # and then ranks that sample by themselves would diverge.
        arguments["disable_custom_all_reduce"] = True
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return arguments


def engine_variables(config: GenerationConfig, *, on_gpu: bool) -> dict[str, str]:
    """Environment variables that the engine's process needs before it imports torch."""
    engine = config.vllm
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": engine.log_level,
        # As few processes as possible, for a fast start: `LLM` runs its model in the
        # worker itself, and `AsyncLLM` in the engine's process, apart from the event
        # loop. By default a CPU's engine has one more process below it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if engine.tensor_parallel_size > 1:
        # See `_parallel_args`.
        variables["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
        variables["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
    if on_gpu:
        return variables
    # vLLM would bind its threads to cores that Ray may give to another replica as well.
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if is_eager(engine, on_gpu):
        # `enforce_eager` leaves the rank of a log-prob compiled, which takes up to half
        # a minute at the first row.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if config.num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(config.num_threads)
    return variables


def is_eager(engine: VllmConfig, on_gpu: bool) -> bool:
    """Whether layers run without compilation."""
    return (not on_gpu) if engine.enforce_eager is None else engine.enforce_eager


def _cache_bytes(engine: VllmConfig, on_gpu: bool) -> int | None:
    size = engine.kv_cache_gib
    if size is None:
        if on_gpu:
            return None
        size = _CPU_CACHE_GIB
    return int(size * _GIB)


def _local(name: str | os.PathLike[str]) -> str:
    """Return a folder as an absolute path, and a hub name unchanged."""
    path = Path(name)
    return str(path.resolve()) if path.is_dir() else str(name)
