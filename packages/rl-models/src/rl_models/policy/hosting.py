"""Settings with which the driver starts the workers of a generation backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_distributed.errors import ConfigError
from rl_distributed.registrations import Registration
from rl_models.generation.config import GenerationConfig
from rl_models.generation.traits import GenerationTraits
from rl_models.registry import generation_registrations

__all__ = ["Hosting", "hosting_of", "rows_at_once"]


@dataclass(frozen=True)
class Hosting:
    """Settings of a backend's workers; those of equal settings can be reused."""

    worker_class: str
    variables: Mapping[str, str] = field(repr=False)
    """Environment variables of the process."""
    calls_at_once: int
    """Number of `generate` calls that a replica runs at a time."""
    workers_per_replica: int = 1
    """Number of workers that hold one model together."""
    updates_in_flight: bool = False
    """Whether weights may come while a replica runs `generate`."""
    frees_memory: bool = False
    """Whether replicas are told when they may free memory."""
    registrations: tuple[Registration, ...] = field(default=(), repr=False)
    """Backends that the driver has registered in code."""


def hosting_of(
    backend: type[GenerationTraits],
    config: GenerationConfig,
    *,
    on_gpu: bool,
    updates_in_flight: bool = False,
) -> Hosting:
    """Return the hosting of a backend.

    Args:
        backend: Its traits.
        config: The generation config.
        on_gpu: Whether workers have GPUs.
        updates_in_flight: Whether weights come while rows are sampled.

    Raises:
        ConfigError: A setting that cannot work, before a process is started.
    """
    backend.check_config(config, on_gpu=on_gpu)
    obstacle = backend.in_flight_obstacle(config) if updates_in_flight else None
    if obstacle is not None:
        raise ConfigError(
            "updates_in_flight=True needs replicas that load weights while they "
            f"sample, and {obstacle}"
        )
    return Hosting(
        backend.worker_class,
        dict(backend.process_variables(config, on_gpu=on_gpu)),
        backend.calls_at_once(config),
        backend.workers_per_replica(config),
        updates_in_flight,
        backend.frees_memory(config, on_gpu=on_gpu),
        generation_registrations(config.backend),
    )


def rows_at_once(config: GenerationConfig) -> int | None:
    """Return the number of rows that a replica decodes at a time; None: no limit."""
    if config.backend == "vllm":
        return config.vllm.max_num_seqs
    return config.max_batch_size
