"""The environment `file`: an environment class from a Python file of the user."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.python_file import PythonFileError, existing_file, load_from_file
from rl_envs.registry import EnvironmentSpec, register_env

__all__ = ["FileEnvironment", "FileEnvironmentConfig"]


class FileEnvironmentConfig(Config):
    """Settings of the environment `file`."""

    file: str
    """Python file that defines the class; it can import modules beside it."""
    name: str = "Environment"
    """Name of the class in the file."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""

    @field_validator("file")
    @classmethod
    def _is_a_file(cls, value: str) -> str:
        return existing_file(value)

    @model_validator(mode="after")
    def _check_class(self) -> Self:
        # With the rest of the configuration, so that a mistake in the file is reported
        # before any model is loaded.
        try:
            self.spec()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def spec(self) -> EnvironmentSpec:
        """Run the file and return what it defines, with its settings.

        Raises:
            ConfigError: The file cannot be run, has no such class, or the class does
                not accept the settings.
        """
        found = _load(self.file, self.name)
        if not hasattr(found, "config_class"):
            _check_arguments(found, self.settings)
        return EnvironmentSpec.of(found, self.settings)


def _load(file: str, name: str) -> type[EnvironmentInterface[Any]]:
    try:
        found = load_from_file(file, name, kind="environment", thing="class")
    except PythonFileError as error:
        remedy = "; name one by env.settings.name" if error.is_name else ""
        raise ConfigError(f"{error}{remedy}") from error.__cause__
    if not isinstance(found, type) or not issubclass(found, EnvironmentInterface):
        raise ConfigError(
            f"{name} of {file} must be a subclass of rl_envs.EnvironmentInterface: got "
            f"{found!r:.80}; a reward function takes env.name=reward"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{name} of {file} must define {', '.join(missing)}")
    return found


def _check_arguments(cls: type, settings: Mapping[str, Any]) -> None:
    """Reject settings that the class would not accept."""
    signature = inspect.signature(cls)
    try:
        signature.bind(**settings)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise ConfigError(
            f"settings of {cls.__name__}: {error}; it takes {takes}"
        ) from error


@register_env("file")
class FileEnvironment:
    """Runs an environment class from a Python file.

    Args:
        config: The settings.

    Raises:
        ConfigError: The file cannot be run, or has no such class.
    """

    config_class = FileEnvironmentConfig

    def __new__(  # type: ignore[misc]
        cls, config: FileEnvironmentConfig
    ) -> EnvironmentInterface[Any]:
        """Return an object of the class in the file, and none of this one.

        What a run asks of an environment, such as the methods that it overrides, is
        thereby asked of the user's.
        """
        return config.spec().make()

    @staticmethod
    def declares(config: FileEnvironmentConfig) -> Any:
        """Return the class in the file, which may declare an `actor_environment`."""
        return config.spec().declares
