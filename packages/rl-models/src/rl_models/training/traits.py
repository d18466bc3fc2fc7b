"""Traits of a training backend, which the driver reads before a process is started.

A backend class declares them by class attributes and static methods of these names. It
may leave out any whose default below is right. It may inherit from `TrainingTraits`,
but need not.

A backend that is found by an entry point can declare them in a class `Traits` of the
entry point's module instead, so that the driver need not import the backend's
libraries. Such a backend has all methods of its protocol.
"""

from __future__ import annotations

from typing import ClassVar

from rl_models.backend_forms import with_defaults
from rl_models.config import PolicyConfig
from rl_models.registry import training_backend_described

__all__ = ["TrainingTraits", "get_training_traits"]


class TrainingTraits:
    """The traits that a training backend may declare, with their defaults."""

    worker_class: ClassVar[str] = "rl_models.training.worker.TrainingWorker"
    """Path of the worker class; its environment provides the backend's imports."""

    parallel_axes: ClassVar[tuple[str, ...]] = ()
    """Axes of `policy.parallelism` that it supports, besides `data`."""

    has_adapters: ClassVar[bool] = False
    """Whether it trains `policy.lora`."""

    @staticmethod
    def stages_outermost(config: PolicyConfig) -> bool:
        """Return whether ranks are numbered stage by stage, not copy by copy.

        See `ParallelismConfig.sharding`.
        """
        return False

    @staticmethod
    def check_config(config: PolicyConfig) -> None:
        """Refuse settings that cannot work.

        Raises:
            ConfigError: A setting, by its key, with a remedy.
        """


def get_training_traits(name: str) -> type[TrainingTraits]:
    """Return the traits of a training backend, completed by the defaults.

    Raises:
        RegistryError: The name is unknown.
    """
    return with_defaults(training_backend_described(name), TrainingTraits)
