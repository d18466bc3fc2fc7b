"""What a generation backend asks of the workers that host it.

A backend class says so by attributes that it may leave out:

- `worker_class`: path of the worker class, whose environment has what it imports;
- `check_config(config, on_gpu=...)`: raises where a setting cannot work;
- `process_variables(config, on_gpu=...)`: environment variables of its process;
- `calls_at_once(config)`: calls of `generate` that run in one replica at a time.
"""

from __future__ import annotations

from typing import Any

from rl_models.generation.config import GenerationConfig

__all__ = ["calls_at_once", "check_backend", "process_variables", "rows_at_once"]


def check_backend(
    backend: type[Any], config: GenerationConfig, *, on_gpu: bool
) -> None:
    """Raise what is known to be wrong with the settings before a process starts."""
    check = getattr(backend, "check_config", None)
    if check is not None:
        check(config, on_gpu=on_gpu)


def process_variables(
    backend: type[Any], config: GenerationConfig, *, on_gpu: bool
) -> dict[str, str]:
    """Environment variables of the workers."""
    variables = getattr(backend, "process_variables", None)
    return {} if variables is None else dict(variables(config, on_gpu=on_gpu))


def calls_at_once(backend: type[Any], config: GenerationConfig) -> int:
    """Calls that one replica takes at a time."""
    number = getattr(backend, "calls_at_once", None)
    return 1 if number is None else int(number(config))


def rows_at_once(config: GenerationConfig) -> int | None:
    """Rows that one replica decodes at a time; None: as many as it is given."""
    if config.backend == "vllm":
        return config.vllm.max_num_seqs
    return config.max_batch_size
