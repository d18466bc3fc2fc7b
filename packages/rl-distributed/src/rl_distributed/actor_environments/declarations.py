"""Find the environment that a class runs in without importing the class.

The first of these that there is:

1. the option `environment` of the builder (or `py_executable`);
2. the user's `RL_ENV_CONFIG`;
3. an entry point of the group `rl.actor_environments`, of whichever distribution owns
   the class: the name is the path of a class, a module or a package, and the value an
   `ActorEnvironment` in a module that is light to import;
4. the attribute `actor_environment` of the class, where it can be imported here;
5. the driver's environment.

Of several names in 2 or 3, the longest that the path of the class begins with counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from rl_distributed.actor_environments.base import ActorEnvironment
from rl_distributed.actor_environments.existing import DriverEnvironment
from rl_distributed.actor_environments.extra import ExtraEnvironment
from rl_distributed.actor_environments.overrides import user_environments
from rl_distributed.errors import ConfigError, RegistryError
from rl_distributed.registry import Registry
from rl_distributed.suggestion import did_you_mean

__all__ = [
    "Declaration",
    "checked_environment",
    "declared_environment",
    "declared_names",
    "environment_registry",
    "get_environment",
    "own_environment",
]

ATTRIBUTE = "actor_environment"

environment_registry: Registry[ActorEnvironment] = Registry(
    "rl.actor_environments", "actor environment"
)
"""Declared environments, by the path of the class, module or package they are for."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """An environment and where it is said that a class needs it."""

    environment: ActorEnvironment
    source: Literal["option", "user", "entry point", "class", "default"]


def declared_environment(worker_class: str | Callable[..., Any]) -> Declaration:
    """Return the environment of a class or factory, or of the class at a path.

    A class whose module is not imported here is left to the worker, which reports its
    attribute once it has imported it.

    Raises:
        ConfigError: the declaration is no environment, or the user's file is wrong.
        RegistryError: an entry point cannot be loaded.
    """
    path = _path_of(worker_class)
    chosen = user_environments()
    if (name := _longest(path, chosen)) is not None:
        return Declaration(chosen[name], "user")
    if (name := _longest(path, environment_registry.names())) is not None:
        found = environment_registry.get(name)
        where = f"the entry point {name!r} of {environment_registry.group}"
        return Declaration(checked_environment(found, where), "entry point")
    cls = _imported(worker_class) if isinstance(worker_class, str) else worker_class
    own = own_environment(cls)
    if own is not None:
        return Declaration(own, "class")
    return Declaration(DriverEnvironment(), "default")


def own_environment(cls: Callable[..., Any] | None) -> ActorEnvironment | None:
    """Return the attribute `actor_environment` of a class, or None where it has none.

    Raises:
        ConfigError: it is no environment.
    """
    found = getattr(cls, ATTRIBUTE, None)
    return None if found is None else checked_environment(found, _path_of(cls))


def get_environment(name: str) -> ActorEnvironment:
    """Return the environment that a person means by `name`.

    Args:
        name: `distribution[extra]`, or the path of a class, module or package for
            which one is declared.

    Raises:
        RegistryError: none is declared for it.
    """
    distribution, bracket, extra = name.strip().partition("[")
    if bracket and extra.endswith("]"):
        return ExtraEnvironment(distribution.strip(), extra[:-1].strip())
    found = declared_environment(name)
    if found.source == "default":
        known = declared_names()
        raise RegistryError(
            f"no environment is declared for {name!r}{did_you_mean(name, known)} "
            f"(declared: {', '.join(known) or 'none'}); an extra is written name[extra]"
        )
    return found.environment


def declared_names() -> list[str]:
    """Return the names that entry points, this process or the user's file declare."""
    return sorted({*environment_registry.names(), *user_environments()})


def checked_environment(value: object, where: str) -> ActorEnvironment:
    """`value`, if it is an environment.

    Raises:
        ConfigError: it is none; the message begins with `where` it was declared.
    """
    if not isinstance(value, ActorEnvironment):
        raise ConfigError(
            f"{where} must declare an ActorEnvironment, such as "
            f'ExtraEnvironment("package", "extra"): got {value!r}'
        )
    return value


def _longest(path: str, names: Iterable[str]) -> str | None:
    # With the dot, so that `pkg.mod` does not match `pkg.model`.
    fitting = [n for n in names if path == n or path.startswith(f"{n}.")]
    return max(fitting, key=len, default=None)


def _path_of(cls: Any) -> str:
    if isinstance(cls, str):
        return cls
    return f"{cls.__module__}.{cls.__qualname__}"


def _imported(path: str) -> type[Any] | None:
    module, _, name = path.rpartition(".")
    # Never imported here, because the driver may lack its dependencies.
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
