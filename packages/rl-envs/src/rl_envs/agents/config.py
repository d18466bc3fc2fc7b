"""Settings of agents."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rl_distributed.config import Config
from rl_envs.agents.tasks import AgentLimits
from rl_envs.python_file import existing_file

__all__ = ["AgentConfig", "FileAgentConfig"]

_MODULE = re.compile(r"[^\W\d]\w*(\.(?!py$)[^\W\d]\w*)+")
"""Dotted names of modules; names of files end in `.py`."""


class AgentConfig(Config):
    """How agents are run."""

    model_name: str = Field("policy", min_length=1)
    """What requests call the policy; any other name is refused."""
    max_at_once: int = Field(64, ge=1)
    """Tasks that a worker runs at the same time; further ones wait."""
    time_limit_s: float = Field(600.0, gt=0)
    """Seconds that a task may take from its start; its agent is ended then."""
    max_calls: int = Field(128, ge=1)
    """Requests that a task may make."""
    limit_reward: float | None = None
    """Reward of a task that met its time limit, its number of requests or the longest
    row, and did not end well in spite of it; null: it counts as an environment error
    and is not trained on."""

    @property
    def limits(self) -> AgentLimits:
        """What whoever serves the model must know."""
        return AgentLimits(
            self.model_name,
            self.max_calls,
            self.time_limit_s,
            self.limit_reward,
            self.max_at_once,
        )


class FileAgentConfig(AgentConfig):
    """Settings of the environment `agent`: which program it is."""

    file: str | None = None
    """Python file that defines the agent, or an installed module such as
    `my_package.agent`; modules beside the file can be imported."""
    function: str = "agent"
    """Name of the agent in the file."""
    command: str | list[str] | None = None
    """Command line of a program, in place of a file; it is given the task as JSON on
    its standard input, and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL."""
    reward_from: Literal["last_line", "exit_code"] = "last_line"
    """Where the reward of a program is: the number in the last line that it writes, or
    1 for exit code 0 and 0 for any other."""
    reward_file: str | None = None
    """Python file with a reward function, which is given as response what the agent
    returns, or what the program writes; null: the agent itself gives the reward."""
    reward_function: str = "reward"
    """Name of the function in that file."""

    @field_validator("file")
    @classmethod
    def _find_module(cls, value: str | None) -> str | None:
        # An existing file of that name wins over a module.
        if value is None or not _MODULE.fullmatch(value) or Path(value).exists():
            return value
        try:
            # Looks for the parents by importing them, hence the error for a missing
            # one.
            spec = find_spec(value)
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            raise ValueError(
                "must be a Python file or an installed module: there is no module "
                f"{value!r}; correct the name, or give the path of a .py file"
            )
        return spec.origin

    @field_validator("file", "reward_file")
    @classmethod
    def _is_a_file(cls, value: str | None) -> str | None:
        return None if value is None else existing_file(value)

    @model_validator(mode="after")
    def _names_one_agent(self) -> Self:
        if (self.file is None) == (self.command is None):
            got = "neither" if self.file is None else "both"
            raise ValueError(
                "an agent is a function of a Python file or a program: set file or "
                f"command (env.settings.file=agent.py): got {got}"
            )
        if self.command is not None and not self.command_line:
            raise ValueError("command must name a program: got an empty one")
        if self.file is not None and self.reward_from != "last_line":
            raise ValueError(
                "reward_from is read for a command only, as a function returns its "
                f"reward: got {self.reward_from!r} with file"
            )
        return self

    @property
    def command_line(self) -> list[str]:
        """The program and its arguments."""
        given = self.command or []
        return shlex.split(given) if isinstance(given, str) else list(given)
