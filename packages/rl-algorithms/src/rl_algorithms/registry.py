"""Algorithms and their configurations by name, from this package and from others.

Finding a configuration class imports no trainer, and so neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import rl_algorithms
from rl_algorithms.presets import find_preset, preset_names
from rl_distributed.errors import ConfigError, RegistryError
from rl_distributed.registry import Registry
from rl_distributed.suggestion import nearest

if TYPE_CHECKING:
    from rl_algorithms.trainers.base import BaseTrainer
    from rl_algorithms.trainers.settings.config import TrainerConfig

__all__ = [
    "algorithm_names",
    "algorithm_settings",
    "get_algorithm",
    "get_config_class",
    "register_algorithm",
    "suggest_algorithm",
]

_ALGORITHMS: Registry[type[BaseTrainer[Any]]] = Registry("rl.algorithms", "algorithm")
_CONFIGS: Registry[type[TrainerConfig]] = Registry(
    "rl.algorithm_configs", "configuration of an algorithm"
)
TrainerT = TypeVar("TrainerT", bound="type[BaseTrainer[Any]]")


def register_algorithm(name: str) -> Callable[[TrainerT], TrainerT]:
    """Make a trainer class known as `name`, as a decorator.

    Other packages use the entry-point group `rl.algorithms`.
    """
    return _ALGORITHMS.register(name)


def get_algorithm(name: str) -> type[BaseTrainer[Any]]:
    """Return the trainer class of an algorithm, or of the algorithm of a preset.

    Raises:
        RegistryError: The name is unknown, or its package is missing.
        ConfigError: What is registered is no trainer.
    """
    found: Any = _ALGORITHMS.get(_algorithm_of(name))
    if not (isinstance(found, type) and issubclass(found, rl_algorithms.BaseTrainer)):
        raise ConfigError(
            f"algorithm {name!r} must be a subclass of BaseTrainer: got {found!r}"
        )
    return found


def get_config_class(name: str) -> type[TrainerConfig]:
    """Return the class of an algorithm's configuration, without its trainer if it can.

    A package names the class in the entry-point group `rl.algorithm_configs`, by the
    name of the algorithm. Without that entry, the trainer is imported and asked.

    Raises:
        RegistryError: The name is unknown, or its package is missing.
        ConfigError: What is registered is no trainer.
    """
    algorithm = _algorithm_of(name)
    # A trainer that is registered in code may replace one of a package.
    if _ALGORITHMS.loaded(algorithm) is None and algorithm in _CONFIGS:
        _ALGORITHMS.check(algorithm)
        return _CONFIGS.get(algorithm)
    return get_algorithm(algorithm).config_type()


def _algorithm_of(name: str) -> str:
    """Return the algorithm of that name, or of the preset of that name."""
    if name in _ALGORITHMS:
        return name
    preset = find_preset(name)
    if preset is None:
        raise RegistryError(
            f"unknown algorithm {name!r}{suggest_algorithm(name)} (algorithms: "
            f"{', '.join(algorithm_names())}; presets: {', '.join(preset_names())})"
        )
    return preset.algorithm


def algorithm_settings(
    name: str, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a tree of settings with those of the preset `name` beneath it.

    Where `name` is an algorithm and no preset, the settings are what they are.
    """
    preset = None if name in _ALGORITHMS else find_preset(name)
    if preset is not None:
        return preset.under(settings or {})
    # A document keeps where each key was written.
    return settings if isinstance(settings, dict) else dict(settings or {})


def suggest_algorithm(name: str, others: Iterable[str] = ()) -> str:
    """Say which names are near `name`, or nothing where none is.

    Args:
        name: What is no algorithm and no preset.
        others: Names of other things that may be meant.
    """
    groups = ([*others, *algorithm_names()], preset_names())
    near = [found for group in groups if (found := nearest(name, group))]
    names = " or ".join(map(repr, near))
    return f"; did you mean {names}?" if near else ""


def algorithm_names() -> list[str]:
    """Return the names of all algorithms, those of other packages included.

    `rl_algorithms.presets.preset_names` returns those of the presets.
    """
    return list(_ALGORITHMS.names())
