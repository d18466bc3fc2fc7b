"""The choice of a generation backend for `auto`, and for this process.

The rule of `auto` follows from `python -m benchmarks.generation` on two cores:

- on a CPU `huggingface`: two to seven times faster up to a million parameters, and
  about as fast from ten million on (vLLM has a fixed cost per step there);
- on GPUs, which were not measured, `vllm`, which is made for them, if its environment
  exists already; else `huggingface`.
"""

from __future__ import annotations

import importlib.util

from rl_distributed.actor_environments import (
    BuiltEnvironment,
    DriverEnvironment,
    EnvironmentStore,
)
from rl_distributed.errors import DistributedError
from rl_distributed.logs.logging import get_logger
from rl_models.environments import VLLM
from rl_models.generation.config import GenerationConfig
from rl_models.generation.traits import get_generation_traits

__all__ = ["choose_backend", "for_this_process", "has_vllm", "without_trainer"]

_logger = get_logger(__name__)

_FALLBACK = "huggingface"


def choose_backend(config: GenerationConfig, *, on_gpu: bool) -> GenerationConfig:
    """Return the config with `auto` replaced by a backend's name.

    Args:
        config: The generation config.
        on_gpu: Whether replicas have GPUs.
    """
    if config.backend != "auto":
        return config
    name = "vllm" if on_gpu and has_vllm() else _FALLBACK
    _logger.info("generation.backend auto: %s", name)
    return config.model_copy(update={"backend": name})


def for_this_process(config: GenerationConfig) -> GenerationConfig:
    """Return the config for a backend that runs here and not in a worker.

    vLLM has an environment of its own. Outside of it, a few rows are sampled by the
    backend `huggingface`, which gives the same log-probs.
    """
    config = choose_backend(without_trainer(config), on_gpu=False)
    if config.backend != "vllm" or _is_installed():
        return config
    return config.model_copy(update={"backend": _FALLBACK})


def without_trainer(config: GenerationConfig) -> GenerationConfig:
    """Return the config for sampling where nothing is trained.

    A backend that samples in the workers of a trainer gives way to `huggingface`, which
    gives the same log-probs.
    """
    name = config.backend
    if name == "auto" or get_generation_traits(name).samples_in is None:
        return config
    return config.model_copy(update={"backend": _FALLBACK})


def _is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def has_vllm() -> bool:
    """Whether a worker with vLLM could start without building anything."""
    try:
        environment = VLLM.resolve()
        if isinstance(environment, DriverEnvironment):
            return _is_installed()
        if not isinstance(environment, BuiltEnvironment):
            return True
        return EnvironmentStore().find(environment.key()).state == "ready"
    except DistributedError as error:
        _logger.info("generation.backend auto: no vllm, because %s", error)
        return False
