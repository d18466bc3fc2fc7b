"""What a generation backend asks of the workers that host it.

A backend class says so by attributes that it may leave out:

- `worker_class`: path of the worker class, whose environment has what it imports;
- `check_config(config, on_gpu=...)`: raises where a setting cannot work;
- `process_variables(config, on_gpu=...)`: environment variables of its process;
- `calls_at_once(config)`: calls of `generate` that run in one replica at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_distributed.errors import ConfigError
from rl_distributed.virtual_cluster import RayVirtualCluster
from rl_models.generation.config import GenerationConfig

__all__ = ["Hosting", "hosting_of", "replicas_per_node", "rows_at_once"]

_WORKER = "rl_models.policy.generation_worker.GenerationWorker"


@dataclass(frozen=True)
class Hosting:
    """How the workers of a backend are made; equal ones can take over each other's."""

    worker_class: str
    variables: Mapping[str, str]
    """Environment variables of the process."""
    calls_at_once: int
    """Calls of `generate` that run in one replica at a time."""


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
    return Hosting(
        getattr(backend, "worker_class", _WORKER),
        {} if variables is None else dict(variables(config, on_gpu=on_gpu)),
        1 if at_once is None else int(at_once(config)),
    )


def rows_at_once(config: GenerationConfig) -> int | None:
    """Rows that one replica decodes at a time; None: as many as it is given."""
    if config.backend == "vllm":
        return config.vllm.max_num_seqs
    return config.max_batch_size


def replicas_per_node(
    cluster: RayVirtualCluster, num_replicas: int | None
) -> list[int] | None:
    """Fill the nodes in order; None uses every bundle.

    Raises:
        ConfigError: There are not so many bundles.
    """
    if num_replicas is None:
        return None
    counts = list(cluster.bundle_counts)
    if num_replicas > sum(counts):
        raise ConfigError(
            f"generation.num_replicas must not exceed the bundles of the cluster: got "
            f"{num_replicas} with {sum(counts)}; lower it, or enlarge the cluster."
        )
    used: list[int] = []
    for count in counts:
        used.append(min(count, num_replicas - sum(used)))
    return used
