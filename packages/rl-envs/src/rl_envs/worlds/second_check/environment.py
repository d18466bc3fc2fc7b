"""The environment `second_check`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from pydantic import Field

from rl_distributed.batch.arrays import to_numpy
from rl_distributed.config import Config
from rl_distributed.errors import ConfigError, UserError
from rl_distributed.logs.logging import get_logger
from rl_envs.agents.tasks import agent_limits_of
from rl_envs.errors import EnvironmentContractError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Rewards,
    as_columns,
    has_own,
    log_as_text,
    num_rows,
    total_reward,
)
from rl_envs.outcomes import SECOND_CHECK_KEY, second_check_of
from rl_envs.registry import create_env, register_env
from rl_envs.rewards.environments import as_environment

__all__ = [
    "CheckConfig",
    "ScorerConfig",
    "SecondCheckConfig",
    "SecondCheckEnvironment",
]

_logger = get_logger(__name__)


class ScorerConfig(Config):
    """An environment by name."""

    name: str
    """Registered name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Its settings."""


class CheckConfig(ScorerConfig):
    """A check by name."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Columns to rename: the environment's name to the row's column."""


class SecondCheckConfig(Config):
    """Settings of the second_check environment."""

    environment: ScorerConfig | None = None
    """Environment that plays and rewards."""
    check: CheckConfig | None = None
    """Stricter environment that checks high-scoring answers; it never changes a reward.
    `{name: code, columns: {tests: hidden_tests}}` runs hidden tests, `{name:
    math_format}` demands one unambiguous answer."""
    min_reward: float = 1.0
    """Reward of the last turn from which on an answer is checked."""
    accept_reward: float = 1.0
    """Reward of the check from which on an answer is accepted."""
    sample_rate: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the high-scoring answers that are checked, drawn by their text."""


@register_env("second_check")
class SecondCheckEnvironment(EnvironmentInterface[Any]):
    """Watches an environment for reward hacking, by a stricter check.

    Conversations and rewards are those of the environment. Of those that end with a
    high reward, a sample is scored by the check as well; metadata get `second_check`,
    `accepted` or `rejected`. The same conversation is always drawn or left out,
    whatever its batch. If the check fails for another reason than a user's mistake,
    answers remain unchecked, with a warning.

    Args:
        config: The settings, or a mapping of them.
        environment: Environment or reward function in place of the setting.
        check: Environment or reward function in place of the setting.

    Raises:
        ConfigError: Environment or check are missing or given twice, or do not fit.
        RegistryError: A name is unknown.
    """

    config_class = SecondCheckConfig

    def __init__(
        self,
        config: SecondCheckConfig | Mapping[str, Any] | None = None,
        *,
        environment: Any = None,
        check: Any = None,
    ) -> None:
        if not isinstance(config, SecondCheckConfig):
            config = SecondCheckConfig.from_dict(
                dict(config or {}), source="environment 'second_check'"
            )
        self.config = config
        for name, given in (("environment", environment), ("check", check)):
            if (getattr(config, name) is None) == (given is None):
                raise ConfigError(
                    f"environment 'second_check' takes {name!r} either in its settings "
                    f"or as an object: got {'neither' if given is None else 'both'}"
                )
        self._environment = _made(config.environment, environment)
        try:
            self._check = _made(config.check, check)
            self._refuse_unfit()
        except BaseException:
            # Made before the check, whose failure would leave its processes behind.
            self._environment.shutdown()
            raise

    def _refuse_unfit(self) -> None:
        if self._check.many_turns:
            raise ConfigError(
                "the check of environment 'second_check' must judge one response, but "
                f"{type(self._check).__name__} has many turns; name another"
            )
        if agent_limits_of(self._environment) is not None:
            raise ConfigError(
                "environment 'second_check' cannot watch one that runs agents: check "
                "their results in the agent's own reward"
            )

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        """Step the environment, and check what ends with a high reward.

        Raises:
            UserError: Environment or check raised it.
        """
        num_rows(message_log_batch, metadata)
        found = as_columns(self._environment.step(message_log_batch, metadata))
        rewards = to_numpy(total_reward(found.rewards))
        is_high = to_numpy(found.terminateds) & (rewards >= self.config.min_reward)
        drawn = [
            row
            for row in np.flatnonzero(is_high).tolist()
            if _share_of(message_log_batch[row]) < self.config.sample_rate
        ]
        verdicts = self._verdicts(
            [message_log_batch[row] for row in drawn],
            [_renamed(metadata[row], self.config.check) for row in drawn],
        )
        returned = list(found.metadata)
        for row, verdict in zip(drawn, verdicts, strict=True):
            if verdict is not None:
                known = returned[row] if isinstance(returned[row], Mapping) else {}
                returned[row] = {**known, SECOND_CHECK_KEY: verdict}
        return found._replace(metadata=returned)

    def _verdicts(
        self, logs: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> list[str | None]:
        # The check may be costly, and most batches have few high rewards.
        if not logs:
            return []
        try:
            found = as_columns(self._check.step(logs, metadata))
        # A mistake in the settings or the rows: it would recur with each batch.
        except UserError:
            raise
        except Exception as error:
            _logger.warning(
                "%d answers were not checked a second time: %s: %s",
                len(logs),
                type(error).__name__,
                error,
            )
            return [None] * len(logs)
        if len(found.terminateds) != len(logs) or not to_numpy(found.terminateds).all():
            raise EnvironmentContractError(
                "the check of environment 'second_check' must end each conversation "
                f"with one reward: got {len(found.terminateds)} for {len(logs)} "
                "answers, or some go on; name an environment that judges one response"
            )
        return [
            # NaN: the check could not score the answer.
            None
            if np.isnan(reward)
            else "accepted"
            if reward >= self.config.accept_reward
            else "rejected"
            for reward in to_numpy(total_reward(found.rewards)).tolist()
        ]

    def reset(self, metadata: Sequence[Any], seeds: Sequence[int]) -> Sequence[Any]:
        """Begin conversations of the environment that is watched."""
        if not has_own(self._environment, "reset"):
            return metadata
        return self._environment.reset(metadata, seeds)

    def close(self, metadata: Sequence[Any]) -> None:
        """Close conversations of the environment that is watched."""
        if has_own(self._environment, "close"):
            self._environment.close(metadata)

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[Any]],
    ) -> list[Rewards] | None:
        """Score groups as the environment does."""
        return self._environment.score_groups(message_logs, metadata)

    def unusable_rows(self, metadata: Sequence[Any]) -> dict[int, str]:
        """Return the rows that the environment or the check cannot score."""
        found = dict(self._environment.unusable_rows(metadata))
        renamed = [_renamed(row, self.config.check) for row in metadata]
        for row, reason in self._check.unusable_rows(renamed).items():
            found.setdefault(row, f"second check: {reason}")
        return dict(sorted(found.items()))

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools of the environment."""
        return self._environment.tool_schemas()

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch and the environment's metrics, and those of the check.

        `second_check_rate` is the share of answers that were checked, and
        `second_check_rejected_rate` the share of these that the check rejected.
        """
        batch, metrics = self._environment.global_post_process_and_metrics(batch)
        rows = list(batch.get("metadata") or ())
        checked = [v for v in map(second_check_of, rows) if v is not None]
        if rows:
            metrics["second_check_rate"] = len(checked) / len(rows)
        if checked:
            rejected = checked.count(False) / len(checked)
            metrics["second_check_rejected_rate"] = rejected
        return batch, metrics

    def shutdown(self) -> None:
        """Shut both down, even if one of them raises."""
        with ExitStack() as closing:
            closing.callback(self._environment.shutdown)
            closing.callback(self._check.shutdown)


def _made(config: ScorerConfig | None, given: Any) -> EnvironmentInterface[Any]:
    if config is None:
        return as_environment(given)
    return create_env(config.name, config.settings)


def _renamed(columns: Any, config: CheckConfig | None) -> Any:
    """Return the row as the check sees it."""
    if config is None or not config.columns or not isinstance(columns, Mapping):
        return columns
    kept = {name: v for name, v in columns.items() if name not in config.columns}
    return kept | {
        own: columns[name] for own, name in config.columns.items() if name in columns
    }


def _share_of(log: MessageLog) -> float:
    """Return a number in [0, 1) that depends on the text of a conversation alone."""
    # By content, not by a random draw: a repeated call must come to the same sample.
    text = json.dumps(log_as_text(log), sort_keys=True).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
