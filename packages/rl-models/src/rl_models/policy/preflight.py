"""Checks of a policy before a worker starts or a model is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rl_distributed.errors import ConfigError
from rl_models.backend_forms import own_method, training_form
from rl_models.checkpoint.model_folder import (
    folder_context_length,
    read_model_config,
)
from rl_models.config import PolicyConfig
from rl_models.environments import has_gpu
from rl_models.generation.traits import get_generation_traits
from rl_models.parallelism import (
    ParallelismConfig,
    check_axes,
    check_model_divides,
)
from rl_models.registry import (
    get_training_backend,
    is_described_apart,
)
from rl_models.tokens.tokenizer import check_tokenizer_folder
from rl_models.training.traits import get_training_traits
from rl_models.training.worker_sampler import shares_weights

__all__ = ["check_policy", "check_training_settings"]


def check_training_settings(config: PolicyConfig) -> None:
    """Check the settings that need no model: the training backend and its own checks.

    Raises:
        ConfigError: The backend refuses a setting.
        RegistryError: The backend is unknown.
    """
    get_training_traits(config.backend).check_config(config)


def check_policy(config: PolicyConfig, num_ranks: int) -> None:
    """Check a policy against the number of ranks and the model's folder.

    Args:
        config: The policy's config.
        num_ranks: Workers of the policy.

    Raises:
        ConfigError: A batch size or length is impossible, or a setting is refused.
        ModelLoadError: The model folder is missing or incomplete.
        RegistryError: The backend is unknown.
    """
    data_size = config.parallelism.data_size(num_ranks)
    _check_global_batch(config.train_global_batch_size, data_size)
    _check_layout(config, data_size)
    check_training_settings(config)
    _check_form(config, num_ranks)
    _check_adapters(config)
    shares_weights(config)  # for the error that it raises
    if config.tokenizer.name is not None:
        check_tokenizer_folder(config.tokenizer.name)
    # An override changes the model that is built, so it counts before the folder.
    overridden = config.hf_config_overrides.get("max_position_embeddings")
    limit = overridden or folder_context_length(config.model_name)
    if limit is not None and (config.max_total_sequence_length or 0) > limit:
        raise ConfigError(
            "policy.max_total_sequence_length must not exceed the context of "
            f"{config.model_name}: got {config.max_total_sequence_length} with a "
            f"context of {limit}; use at most {limit}"
        )


def _check_layout(config: PolicyConfig, data_size: int) -> None:
    """Refuse a layout that the backend lacks, or that does not divide the model."""
    # A backend without traits need not declare axes for plain data parallelism.
    if config.parallelism != ParallelismConfig(data=config.parallelism.data):
        offered = get_training_traits(config.backend).parallel_axes
        check_axes(config.parallelism, offered, config.backend)
    replicas = config.dtensor.data_replicas
    if data_size % replicas:
        raise ConfigError(
            "policy.dtensor.data_replicas must divide the data-parallel size: got "
            f"{replicas} with {data_size} ranks; use 1 or {data_size}"
        )
    shards = data_size * config.parallelism.context // replicas
    if shards % config.parallelism.expert:
        raise ConfigError(
            "policy.parallelism.expert must divide the workers of a replica that have "
            f"other tokens, data x context / policy.dtensor.data_replicas ({shards}): "
            f"got {config.parallelism.expert}; use 1 or {shards}"
        )
    model_config = {
        **(read_model_config(config.model_name) or {}),
        **config.hf_config_overrides,
    }
    check_model_divides(config.parallelism, model_config, config.model_name)


def _check_adapters(config: PolicyConfig) -> None:
    """Refuse adapters if the backend has none or peft is not installed."""
    if config.lora is None:
        return
    if not get_training_traits(config.backend).has_adapters:
        raise ConfigError(
            f"policy.lora must be null with the training backend {config.backend!r}, "
            "which trains no adapters; use the backend dtensor"
        )
    # Looked up and not imported: the import takes seconds.
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "policy.lora needs peft, which is not installed: install rl-models[lora]"
        )
    _check_sent_adapter(config)
    folder = config.lora.adapter_path
    if folder is not None and not Path(folder).expanduser().is_dir():
        raise ConfigError(
            f"policy.lora.adapter_path must be a folder: there is none at {folder!r}"
        )


def _check_sent_adapter(config: PolicyConfig) -> None:
    """Refuse adapters that go to a generation backend that does not take them."""
    sent, generation = config.sent_adapter, config.generation
    if sent is None or generation is None or generation.backend == "auto":
        return
    model_config = read_model_config(config.model_name) or {}
    get_generation_traits(generation.backend).check_adapter(
        generation,
        sent,
        {**model_config, **config.hf_config_overrides},
        on_gpu=has_gpu(),
    )


def _check_form(config: PolicyConfig, num_ranks: int) -> None:
    """Refuse settings that a backend of six methods does not support."""
    # Such a backend has all methods, and importing it may take seconds.
    if is_described_apart(config.backend):
        return
    backend = get_training_backend(config.backend)
    if training_form(config.backend, backend) == "whole":
        return
    what = f"training backend {config.backend!r} ({backend.__qualname__})"
    if num_ranks > 1:
        raise ConfigError(
            f"{what} has six methods and trains in one process: got {num_ranks} ranks; "
            "use a cluster of one worker, or give the class all methods of "
            "rl_models.TrainingBackend"
        )
    for name in ("dynamic_batching", "sequence_packing"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"policy.{name} must be null: {what} has six methods and makes its "
                "own micro-batches"
            )
    if config.head != "lm" and own_method(backend, "get_values") is None:
        raise ConfigError(
            f"policy.head {config.head!r} needs get_values, which {what} does not "
            "have; give its class the method, or use the backend dtensor"
        )


def _check_global_batch(size: int | None, num_ranks: int) -> None:
    if size is None or size % num_ranks == 0:
        return
    lower, upper = size - size % num_ranks, size + num_ranks - size % num_ranks
    remedy = f"use {lower} or {upper}" if lower else f"use {upper}"
    raise ConfigError(
        "policy.train_global_batch_size must be a multiple of data-parallel size: got "
        f"{size} with {num_ranks} ranks; {remedy}"
    )
