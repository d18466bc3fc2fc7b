"""Parts of a reward: environments with names and weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError, DistributedError, UserError
from rl_envs.errors import EnvironmentContractError, EnvsError
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.registry import create_env
from rl_envs.rewards.environments import as_environment

__all__ = [
    "MultiRewardConfig",
    "RewardPart",
    "RewardPartConfig",
    "checked_parts",
    "build_parts",
    "named_error",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class RewardPartConfig(Config):
    """One part of `multi_reward`."""

    name: str
    """Name of the part; its reward is `reward/<name>`."""
    env: str | None = None
    """Name of the environment; null: `name`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of that environment."""
    weight: float = 1.0
    """Factor of the reward."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns to rename: the environment's name to the row's column."""


class MultiRewardConfig(Config):
    """Settings of the multi_reward environment."""

    parts: tuple[RewardPartConfig, ...]
    """Parts, at least one; the first may have many turns."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """An environment with a name and a weight."""

    name: str
    """Name of the part; its reward is `reward/<name>`."""
    environment: EnvironmentInterface[Any]
    weight: float = 1.0
    """Factor of the reward."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns to rename: the environment's name to the row's column."""

    def row(self, columns: Any) -> Any:
        """Return a row with its columns renamed for this part's environment."""
        if not self.columns or not isinstance(columns, Mapping):
            return columns
        kept = {name: v for name, v in columns.items() if name not in self.columns}
        return kept | {
            own: columns[name] for own, name in self.columns.items() if name in columns
        }


def build_parts(config: MultiRewardConfig) -> list[RewardPart]:
    """Create the environments of all parts; if one fails, shut down the others.

    Raises:
        ConfigError: A name, a weight or the settings of a part are wrong.
        RegistryError: A part names an unknown environment.
    """
    made: list[RewardPart] = []
    # Before any environment is created, as that may start processes.
    _check_names([(part.name, part.weight) for part in config.parts])
    for part in config.parts:
        try:
            environment = create_env(part.env or part.name, part.settings)
        except Exception as error:
            for earlier in made:
                earlier.environment.shutdown()
            raise named_error(part.name, error) from error
        made.append(RewardPart(part.name, environment, part.weight, part.columns))
    return made


def checked_parts(parts: Sequence[RewardPart]) -> tuple[RewardPart, ...]:
    """Return the parts after checking their names, weights and turns.

    Raises:
        ConfigError: There are none, a name is wrong or occurs twice, a weight is not
            finite, or a part other than the first has many turns.
        RewardError: A part is neither an environment nor a reward function.
    """
    _check_names([(part.name, part.weight) for part in parts])
    found = [
        RewardPart(p.name, as_environment(p.environment), p.weight, p.columns)
        for p in parts
    ]
    for part in found[1:]:
        # Two parts with turns would both want to answer the policy.
        if part.environment.many_turns:
            raise ConfigError(
                f"part {part.name!r} of environment 'multi_reward' has many turns, but "
                f"{found[0].name!r} leads the conversation: put {part.name!r} first; "
                "the others score the conversation at its end"
            )
    return tuple(found)


def _check_names(parts: Sequence[tuple[str, float]]) -> None:
    if not parts:
        raise ConfigError("parts of environment 'multi_reward' must be at least one")
    seen: set[str] = set()
    for name, weight in parts:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                "the name of a part of environment 'multi_reward' must have letters, "
                f"digits, '_', '.' and '-' only: got {name!r}"
            )
        if name in seen:
            raise ConfigError(
                f"parts of environment 'multi_reward' must have different names: got "
                f"{name!r} twice; name the environment by env, and the part as you like"
            )
        seen.add(name)
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight):
            raise ConfigError(
                f"the weight of part {name!r} of environment 'multi_reward' must be a "
                f"finite number: got {weight!r}"
            )


def named_error(name: str, error: Exception) -> DistributedError:
    """Return an error of the same class whose message names the part."""
    where = f"part {name!r} of environment 'multi_reward'"
    if not isinstance(error, DistributedError):
        return EnvsError(f"{where}: {type(error).__name__}: {error}")
    try:
        made = type(error)(f"{where}: {error}")
    except Exception:
        # The class, of another package, takes more than a message.
        is_users = isinstance(error, UserError)
        made = (EnvironmentContractError if is_users else EnvsError)(
            f"{where}: {type(error).__name__}: {error}"
        )
    # Keep its attributes, such as the failure of a worker.
    made.__dict__.update(vars(error))
    return made
