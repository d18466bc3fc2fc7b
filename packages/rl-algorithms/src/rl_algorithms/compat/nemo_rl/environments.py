"""Environments as Ray actors, with the methods of NeMo RL."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import ray

from rl_algorithms.compat.nemo_rl.options import as_keys, refuse_keys
from rl_algorithms.compat.nemo_rl.workers import variables_of_the_program
from rl_distributed.errors import ConfigError
from rl_envs import registry
from rl_envs.interfaces import EnvironmentReturn
from rl_envs.worlds.math import MathEnvironment as _Math

__all__ = ["MathEnvironment", "chunk_list_to_workers", "create_env", "register_env"]

ItemT = TypeVar("ItemT")

_actor_classes: dict[str, str] = {}


class EnvironmentActor:
    """Actor around an environment of `rl_envs`, with the remote methods of NeMo RL.

    Args:
        name: A registered name.
        config: Its settings.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._environment = registry.create_env(name, config)

    def step(
        self,
        message_log_batch: Sequence[Any],
        metadata: Sequence[Any],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[Any]:
        """Score the last response of each conversation."""
        result = self._environment.step(message_log_batch, metadata)
        # Callers of NeMo RL expect None unless they ask for answers.
        return result if return_extracted_answer else result._replace(answers=None)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Post-process all finished rows of a step together."""
        post, metrics = self._environment.global_post_process_and_metrics(batch)
        return post, dict(metrics)

    def shutdown(self) -> bool:
        """Release the resources of the environment."""
        self._environment.shutdown()
        return True


class _MathActor(EnvironmentActor):
    """`rl_envs.MathEnvironment` made with the configuration of NeMo RL."""

    def __init__(self, cfg: Any) -> None:
        keys = as_keys(cfg)
        refuse_keys(
            keys,
            {"math_verify_impl": ("hf_math_verify", "answers are compared in one way")},
            "env.math",
        )
        self._environment = _Math(keys)


_ACTOR: Any = ray.remote(EnvironmentActor)
MathEnvironment: Any = ray.remote(_MathActor)
"""`MathEnvironment.remote(cfg)` is an actor with `step`, as there."""


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """Register an actor class for `create_env`.

    Args:
        env_name: The name.
        actor_class_fqn: `"module.Class"` of a class decorated with `@ray.remote`.

    Raises:
        ConfigError: The name is taken.
    """
    if env_name in _actor_classes or env_name in registry.env_registry.names():
        raise ConfigError(f"an environment {env_name!r} is registered already")
    _actor_classes[env_name] = actor_class_fqn


def create_env(env_name: str, env_config: Any = None) -> Any:
    """Create the actor of an environment by name.

    Args:
        env_name: A name registered with `register_env` or in `rl_envs`.
        env_config: Its settings.

    Raises:
        RegistryError: The name is unknown.
    """
    if env_name in _actor_classes:
        module, _, name = _actor_classes[env_name].rpartition(".")
        actor_class = getattr(importlib.import_module(module), name)
        variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        # The program may have joined a cluster whose processes lack both.
        runtime_env = {"env_vars": {**variables_of_the_program(), **variables}}
        return actor_class.options(runtime_env=runtime_env).remote(env_config)
    if env_name in ("math", "math_default"):
        return MathEnvironment.remote(as_keys(env_config))
    registry.env_registry.get(env_name)
    return _ACTOR.remote(env_name, as_keys(env_config))


def chunk_list_to_workers(to_chunk: Sequence[ItemT], num_workers: int) -> list[Any]:
    """Split a list into contiguous parts, one per worker.

    If there are fewer items than workers, the last workers get empty lists.
    """
    if num_workers < 1:
        raise ConfigError(f"num_workers must be at least 1: got {num_workers}")
    items = list(to_chunk)
    # Slices alone would give fewer lists than there are workers.
    if len(items) <= num_workers:
        singles: list[list[ItemT]] = [[item] for item in items]
        return singles + [[] for _ in range(num_workers - len(items))]
    most = -(-len(items) // num_workers)
    return [items[start : start + most] for start in range(0, len(items), most)]
