"""What a generation backend asks of the workers that host it.

A backend class, or a class `Traits` in the module of its entry point, which can be
imported without the libraries that the backend samples with, says so by attributes that
it may leave out:

- `worker_class`: path of the worker class, whose environment has what it imports;
- `check_config(config, on_gpu=...)`: raises where a setting cannot work;
- `check_model(config, model_config)`: the same for what the model's `config.json` says;
- `process_variables(config, on_gpu=...)`: environment variables of its process;
- `calls_at_once(config)`: calls of `generate` that run in one replica at a time;
- `frees_memory(config, on_gpu=...)`: whether its `release_memory` frees anything; it
  is taken to, where the class has that method and leaves this one out;
- `workers_per_replica(config)`: workers that hold one model together. Each is given its
  `place` in the replica by `setup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_distributed.registrations import Registration
from rl_models.generation.config import GenerationConfig
from rl_models.registry import generation_registrations

__all__ = ["Hosting", "check_model", "hosting_of", "rows_at_once"]

_WORKER = "rl_models.generation.worker.GenerationWorker"


@dataclass(frozen=True)
class Hosting:
    """How the workers of a backend are made; equal ones can take over each other's."""

    worker_class: str
    variables: Mapping[str, str] = field(repr=False)
    """Environment variables of the process."""
    calls_at_once: int
    """Calls of `generate` that run in one replica at a time."""
    workers_per_replica: int = 1
    """Workers that hold one model together."""
    frees_memory: bool = False
    """Whether replicas are told when they may free memory."""
    registrations: tuple[Registration, ...] = field(default=(), repr=False)
    """Backends that the driver has registered in code."""


def hosting_of(
    backend: type[Any], config: GenerationConfig, *, on_gpu: bool
) -> Hosting:
    """How workers host a backend.

    Args:
        backend: Its class.
        config: The generation config.
        on_gpu: Whether workers have GPUs.

    Raises:
        ConfigError: A setting that cannot work, before a process is started.
    """
    check = getattr(backend, "check_config", None)
    if check is not None:
        check(config, on_gpu=on_gpu)
    variables = getattr(backend, "process_variables", None)
    at_once = getattr(backend, "calls_at_once", None)
    size = getattr(backend, "workers_per_replica", None)
    frees = getattr(backend, "frees_memory", None)
    return Hosting(
        getattr(backend, "worker_class", _WORKER),
        {} if variables is None else dict(variables(config, on_gpu=on_gpu)),
        1 if at_once is None else int(at_once(config)),
        1 if size is None else int(size(config)),
        hasattr(backend, "release_memory")
        if frees is None
        else bool(frees(config, on_gpu=on_gpu)),
        generation_registrations(config.backend),
    )


def check_model(
    backend: type[Any], config: GenerationConfig, model_config: Mapping[str, Any]
) -> None:
    """Refuse a model that the backend cannot take with these settings.

    Args:
        backend: Its class.
        config: The generation config.
        model_config: What the model's `config.json` says, overrides included; empty
            for a model that is not in a folder.

    Raises:
        ConfigError: It cannot; before a process is started.
    """
    check = getattr(backend, "check_model", None)
    if check is not None:
        check(config, model_config)


def rows_at_once(config: GenerationConfig) -> int | None:
    """Rows that one replica decodes at a time; None: as many as it is given."""
    if config.backend == "vllm":
        return config.vllm.max_num_seqs
    return config.max_batch_size
