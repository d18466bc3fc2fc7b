"""Names of training and generation backends.

A backend registers itself with a decorator, or is found through the entry-point groups
`rl.training_backends` and `rl.generation_backends`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from rl_distributed.registry import Registry

__all__ = [
    "check_generation_backend",
    "get_generation_backend",
    "get_generation_traits",
    "get_training_backend",
    "register_generation_backend",
    "register_training_backend",
    "training_backend_home",
]

Class = TypeVar("Class", bound=type)

_TRAINING: Registry[Any] = Registry("rl.training_backends", "training backend")
_GENERATION: Registry[Any] = Registry("rl.generation_backends", "generation backend")


def register_training_backend(name: str) -> Callable[[Class], Class]:
    """Decorator that makes a `TrainingBackend` class known as `name`."""
    return _TRAINING.register(name)


def get_training_backend(name: str) -> type[Any]:
    """The class of a training backend; an unknown name gives the nearest one."""
    backend: type[Any] = _TRAINING.get(name)
    return backend


def register_generation_backend(name: str) -> Callable[[Class], Class]:
    """Decorator that makes a `GenerationBackend` class known as `name`."""
    return _GENERATION.register(name)


def training_backend_home(name: str) -> ModuleType | None:
    """The module that an entry point finds a training backend in; see `Registry`."""
    return _TRAINING.home(name)


def check_generation_backend(name: str) -> None:
    """Refuse a name that no generation backend has; imports none."""
    _GENERATION.check(name)


def get_generation_traits(name: str) -> type[Any]:
    """The class that says what a generation backend asks of its workers.

    It is the class `Traits` of the module that the entry point names, where there is
    one: the backend with the libraries that it samples with is not imported then. Else
    it is the backend's class.

    Raises:
        RegistryError: See `get_generation_backend`.
    """
    traits = getattr(_GENERATION.home(name), "Traits", None)
    return get_generation_backend(name) if traits is None else traits


def get_generation_backend(name: str) -> type[Any]:
    """The class of a generation backend; an unknown name gives the nearest one."""
    backend: type[Any] = _GENERATION.get(name)
    return backend
