"""What a training backend tells the driver before a process is started.

A backend class says it by class attributes and static methods of these names, each of
which it may leave out: the defaults stand here. It may inherit from `TrainingTraits`,
and need not.

A backend that an entry point finds can say it in a class `Traits` of the entry point's
module instead, so that a driver does not import what the backend computes with. Such a
backend has all methods of its protocol.
"""

from __future__ import annotations

from typing import ClassVar

from rl_models.backend_forms import with_defaults
from rl_models.config import PolicyConfig
from rl_models.registry import training_backend_described

__all__ = ["TrainingTraits", "get_training_traits"]


class TrainingTraits:
    """What a training backend may say of itself, with what holds if it does not."""

    worker_class: ClassVar[str] = "rl_models.training.worker.TrainingWorker"
    """Path of the class that hosts it; its environment has what the backend imports."""

    parallel_axes: ClassVar[tuple[str, ...]] = ()
    """Axes of `policy.parallelism` besides `data` that it has."""

    has_adapters: ClassVar[bool] = False
    """Whether it trains `policy.lora`."""

    @staticmethod
    def check_config(config: PolicyConfig) -> None:
        """Refuse settings that cannot work.

        Raises:
            ConfigError: A setting, by its key, with a remedy.
        """


def get_training_traits(name: str) -> type[TrainingTraits]:
    """Return what a training backend says of itself, completed by the defaults.

    Raises:
        RegistryError: The name is unknown.
    """
    return with_defaults(training_backend_described(name), TrainingTraits)
