"""Registries of environments and task sources, from this and other packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_distributed.registry import Registry
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.rewards.functional import FunctionalRewardWrapper
from rl_envs.rewards.lists import RewardFns
from rl_envs.tasks import TaskSource

__all__ = [
    "EnvFactory",
    "EnvironmentSpec",
    "create_env",
    "create_task_source",
    "env_registry",
    "register_env",
    "register_task_source",
    "task_registry",
]

EnvT = TypeVar("EnvT")
EnvFactory: TypeAlias = Callable[..., EnvironmentInterface[Any]]
EnvSettings: TypeAlias = Mapping[str, Any] | Config | None

env_registry: Registry[EnvFactory] = Registry("rl.environments", "environment")
"""Environments by name; plugins use the entry-point group `rl.environments`."""

task_registry: Registry[Callable[..., TaskSource]] = Registry("rl.tasks", "task source")
"""Task sources by the name of their world; plugins use the group `rl.tasks`."""


def register_task_source(name: str) -> Callable[[EnvT], EnvT]:
    """Register a `TaskSource` class under the name of its world.

    Raises:
        RegistryError: The name is taken.
    """
    return task_registry.register(name)


def create_task_source(world: str, settings: Mapping[str, Any]) -> TaskSource:
    """Create the task source of a world.

    Args:
        world: A registered name.
        settings: Arguments of its class.

    Raises:
        RegistryError: The name is unknown, or its package is missing.
        ConfigError: The settings are not accepted.
    """
    factory = task_registry.get(world)
    # Bound first, so that a TypeError raised inside the constructor is not mistaken for
    # wrong settings.
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters)
        raise ConfigError(
            f"settings of the tasks of {world!r}: {error}; they may be {known}"
        ) from None
    return factory(**settings)


def register_env(name: str) -> Callable[[EnvT], EnvT]:
    """Register a class, or a function that creates an environment, under a name.

    A class with a `config_class` attribute, a subclass of `Config`, is created with one
    such object; any other is created with the configuration's keys as arguments.

    Raises:
        RegistryError: The name is taken.
    """
    return env_registry.register(name)


def _as_dict(settings: EnvSettings) -> dict[str, Any]:
    if settings is None:
        return {}
    return settings.to_dict() if isinstance(settings, Config) else dict(settings)


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Recipe for creating an environment, in this or another process."""

    name: str
    """Name used in messages."""
    factory: EnvFactory
    """Class or function that creates it."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        env: str | EnvFactory | EnvironmentInterface[Any] | RewardFns,
        config: EnvSettings = None,
    ) -> EnvironmentSpec:
        """Create a spec, checking the settings.

        Args:
            env: A registered name, a class, an environment, or one or more reward
                functions.
            config: Settings for a name or class.

        Raises:
            RegistryError: The name is unknown, or its package is missing.
            ConfigError: The settings are not accepted, or `env` already exists.
        """
        if isinstance(env, str):
            return cls._of_factory(env, env_registry.get(env), config)
        if isinstance(env, type):
            return cls._of_factory(env.__name__, env, config)
        if not isinstance(env, EnvironmentInterface):
            wrapper = FunctionalRewardWrapper(env, **_as_dict(config))
            return cls(wrapper.name, _Existing(wrapper))
        if config:
            raise ConfigError(
                f"settings cannot be applied to a {type(env).__name__} that already "
                "exists; pass the class or a registered name"
            )
        return cls(type(env).__name__, _Existing(env))

    @classmethod
    def _of_factory(
        cls, name: str, factory: EnvFactory, settings: EnvSettings
    ) -> EnvironmentSpec:
        config_class: type[Config] | None = getattr(factory, "config_class", None)
        if config_class is None:
            return cls(name, factory, kwargs=_as_dict(settings))
        # Parsed in the driver: wrong settings fail here, before a process starts.
        config = settings
        if not isinstance(config, config_class):
            config = config_class.from_dict(
                _as_dict(settings), source=f"settings of environment {name!r}"
            )
        return cls(name, factory, (config,))

    @property
    def declares(self) -> EnvFactory:
        """Class or function that may declare an `actor_environment`."""
        if isinstance(self.factory, _Existing):
            return type(self.factory.environment)
        # A factory that stands for another class, such as one in a file, names it.
        named: Callable[..., EnvFactory] | None = getattr(
            self.factory, "declares", None
        )
        return self.factory if named is None else named(*self.args)

    def make(self) -> EnvironmentInterface[Any]:
        """Create the environment.

        Raises:
            ConfigError: The settings are not accepted, or the result is not an
                environment.
        """
        kwargs = dict(self.kwargs or {})
        try:
            environment = self.factory(*self.args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"environment {self.name!r} cannot be created with {sorted(kwargs)}: "
                f"{error}"
            ) from error
        if not isinstance(environment, EnvironmentInterface):
            raise ConfigError(
                f"environment {self.name!r} must be an EnvironmentInterface: its "
                f"factory returned {type(environment).__name__}"
            )
        return environment


@dataclass(frozen=True, slots=True)
class _Existing:
    """A factory that returns an existing object; in another process, a copy."""

    environment: EnvironmentInterface[Any]

    def __call__(self) -> EnvironmentInterface[Any]:
        return self.environment


def create_env(
    env_name: str, env_config: EnvSettings = None
) -> EnvironmentInterface[Any]:
    """Create an environment by name, in this process.

    Args:
        env_name: A registered name.
        env_config: Its settings.

    Raises:
        RegistryError: The name is unknown, or its package is missing.
        ConfigError: The settings are not accepted.
    """
    return EnvironmentSpec.of(env_name, env_config).make()
