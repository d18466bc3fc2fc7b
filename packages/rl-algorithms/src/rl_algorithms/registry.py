"""Algorithms and their configurations by name, from this package and others.

Finding a configuration class imports no trainer, hence neither torch nor Ray.
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
    """Return a decorator that registers a trainer class under `name`.

    Other packages use the entry-point group `rl.algorithms`.
    """
    return _ALGORITHMS.register(name)


def get_algorithm(name: str) -> type[BaseTrainer[Any]]:
    """Return the trainer class of an algorithm, or of the algorithm of a preset.

    Raises:
        RegistryError: The name is unknown, or its package is missing.
        ConfigError: The registered object is not a trainer.
    """
    found: Any = _ALGORITHMS.get(_algorithm_of(name))
    if not (isinstance(found, type) and issubclass(found, rl_algorithms.BaseTrainer)):
        raise ConfigError(
            f"algorithm {name!r} must be a subclass of BaseTrainer: got {found!r}"
        )
    return found


def get_config_class(name: str) -> type[TrainerConfig]:
    """Return an algorithm's configuration class, if possible without its trainer.

    A package names the class in the entry-point group `rl.algorithm_configs`, under the
    name of the algorithm. Without that entry, the trainer is imported.

    Raises:
        RegistryError: The name is unknown, or its package is missing.
        ConfigError: The registered object is not a trainer.
    """
    algorithm = _algorithm_of(name)
    # A trainer registered in code may replace one of a package, and then has a
    # configuration of its own.
    if _ALGORITHMS.loaded(algorithm) is None and algorithm in _CONFIGS:
        # The configuration alone would hide until later that the trainer's package is
        # missing.
        _ALGORITHMS.check(algorithm)
        return _CONFIGS.get(algorithm)
    return get_algorithm(algorithm).config_type()


def _algorithm_of(name: str) -> str:
    """Return the name of an algorithm, or the algorithm of a preset."""
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
    """Return settings merged over those of the preset `name`.

    If `name` is an algorithm and not a preset, return the settings unchanged.
    """
    preset = None if name in _ALGORITHMS else find_preset(name)
    if preset is not None:
        return preset.under(settings or {})
    # Not copied: a parsed document remembers in which line each key was written.
    return settings if isinstance(settings, dict) else dict(settings or {})


def suggest_algorithm(name: str, others: Iterable[str] = ()) -> str:
    """Return a hint at names similar to `name`, or "" if there are none.

    Args:
        name: A name that is neither an algorithm nor a preset.
        others: Further names that may be meant.
    """
    groups = ([*others, *algorithm_names()], preset_names())
    near = [found for group in groups if (found := nearest(name, group))]
    names = " or ".join(map(repr, near))
    return f"; did you mean {names}?" if near else ""


def algorithm_names() -> list[str]:
    """Return the names of all algorithms, including those of other packages.

    `rl_algorithms.presets.preset_names` returns the names of the presets.
    """
    return list(_ALGORITHMS.names())
