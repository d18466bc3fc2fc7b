"""Names of training and generation backends.

A backend registers itself with a decorator, or is found through the entry-point groups
`rl.training_backends` and `rl.generation_backends`. Backends that the driver has
registered in code are sent to workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

from rl_distributed.registrations import Registration
from rl_distributed.registry import Registry
from rl_models.backend_forms import generation_form, training_form

__all__ = [
    "adopt_generation_backends",
    "adopt_training_backends",
    "check_generation_backend",
    "generation_backend_described",
    "generation_registrations",
    "get_generation_backend",
    "get_training_backend",
    "is_described_apart",
    "register_generation_backend",
    "register_training_backend",
    "training_backend_described",
    "training_registrations",
]

Class = TypeVar("Class", bound=type)

_TRAINING: Registry[Any] = Registry("rl.training_backends", "training backend")
_GENERATION: Registry[Any] = Registry("rl.generation_backends", "generation backend")


def register_training_backend(name: str) -> Callable[[Class], Class]:
    """Register a class under a name, as a decorator; workers get it from the driver.

    It has the methods of `TrainingBackend`, or six: `setup(config)`,
    `train_step(batch, loss_fn)`, `get_logprobs(batch)`, `save_checkpoint(path)`,
    `load_checkpoint(path)` and `shutdown()`.

    Raises:
        RegistryError: The name is taken, or the class has neither form.
    """
    register = _TRAINING.register(name)

    def decorate(backend: Class) -> Class:
        training_form(name, backend)
        return register(backend)

    return decorate


def get_training_backend(name: str) -> type[Any]:
    """Return the class of a training backend; an unknown name gives the nearest one."""
    backend: type[Any] = _TRAINING.get(name)
    return backend


def training_registrations(name: str) -> tuple[Registration, ...]:
    """Return the registrations that a worker needs to host this training backend.

    Raises:
        RegistryError: The backend cannot be sent.
    """
    return _TRAINING.registrations(name)


def adopt_training_backends(registrations: Iterable[Registration]) -> None:
    """Register training backends of the driver in this process."""
    _TRAINING.adopt(registrations)


def register_generation_backend(name: str) -> Callable[[Class], Class]:
    """Register a class under a name, as a decorator; workers get it from the driver.

    It has the methods of `GenerationBackend`, or four: `setup(config)`,
    `generate(prompts, sampling_params)`, `update_weights(state_dict)` and `shutdown()`.

    Raises:
        RegistryError: The name is taken, or the class has neither form.
    """
    register = _GENERATION.register(name)

    def decorate(backend: Class) -> Class:
        generation_form(name, backend)
        return register(backend)

    return decorate


def training_backend_described(name: str) -> type[Any]:
    """Return the class with the traits of a training backend; see `training.traits`.

    It is the class `Traits` of the entry point's module, if there is one: the backend
    and its libraries are then not imported. Otherwise it is the backend's class.

    Raises:
        RegistryError: See `get_training_backend`.
    """
    return _apart(_TRAINING.home(name)) or get_training_backend(name)


def is_described_apart(name: str) -> bool:
    """Return whether a training backend's traits can be read without importing it.

    It then has all methods of `TrainingBackend`.
    """
    return _apart(_TRAINING.home(name)) is not None


def _apart(home: ModuleType | None) -> type[Any] | None:
    """Return the class `Traits` of an entry point's module, if it has one."""
    return getattr(home, "Traits", None)


def check_generation_backend(name: str) -> None:
    """Refuse an unknown name of a generation backend, without importing any."""
    _GENERATION.check(name)


def generation_backend_described(name: str) -> type[Any]:
    """Return the class with the traits of a generation backend.

    See `training_backend_described`.

    Raises:
        RegistryError: See `get_generation_backend`.
    """
    return _apart(_GENERATION.home(name)) or get_generation_backend(name)


def get_generation_backend(name: str) -> type[Any]:
    """Get the class of a generation backend; an unknown name gives the nearest one."""
    backend: type[Any] = _GENERATION.get(name)
    return backend


def generation_registrations(name: str) -> tuple[Registration, ...]:
    """Return the registrations that a worker needs to host this generation backend.

    Raises:
        RegistryError: The backend cannot be sent.
    """
    return _GENERATION.registrations(name)


def adopt_generation_backends(registrations: Iterable[Registration]) -> None:
    """Register generation backends of the driver in this process."""
    _GENERATION.adopt(registrations)
