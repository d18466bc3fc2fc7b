"""The environment `reward`: a reward function from a Python file of the user."""

from __future__ import annotations

from typing import Any, Self

from pydantic import field_validator, model_validator

from rl_distributed.config import Config
from rl_envs.errors import RewardCallError, RewardError
from rl_envs.python_file import PythonFileError, existing_file, load_from_file
from rl_envs.registry import register_env
from rl_envs.rewards.functional import FunctionalRewardWrapper
from rl_envs.rewards.lists import build_reward_call

__all__ = ["FileReward", "FileRewardConfig"]


class FileRewardConfig(Config):
    """Settings of the environment `reward`."""

    file: str
    """Python file that defines the function; it can import modules beside it."""
    function: str = "reward"
    """Name of the function in the file."""

    @field_validator("file")
    @classmethod
    def _is_a_file(cls, value: str) -> str:
        return existing_file(value)

    @model_validator(mode="after")
    def _check_function(self) -> Self:
        # With the rest of the configuration, so that a mistake in the function is
        # reported before any model is loaded.
        try:
            build_reward_call(load_reward(self.file, self.function))
        except RewardError as error:
            raise ValueError(str(error)) from error
        return self


def load_reward(file: str, function: str) -> Any:
    """Run a Python file and return one of its functions.

    Args:
        file: Path of the file.
        function: Name of the function.

    Raises:
        RewardCallError: The file cannot be run, or has no such function.
    """
    try:
        return load_from_file(file, function, kind="reward", thing="function")
    except PythonFileError as error:
        remedy = "; name one by env.settings.function" if error.is_name else ""
        raise RewardCallError(f"{error}{remedy}") from error.__cause__


@register_env("reward")
class FileReward(FunctionalRewardWrapper):
    """Scores each response with a function from a Python file.

    The function is any that `FunctionalRewardWrapper` accepts.

    Args:
        config: The settings.

    Raises:
        RewardError: The file cannot be run, or the function's parameters cannot be
            filled.
    """

    config_class = FileRewardConfig

    def __init__(self, config: FileRewardConfig) -> None:
        super().__init__(load_reward(config.file, config.function))
