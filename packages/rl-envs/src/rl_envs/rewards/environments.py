"""Environments built from reward functions, for single responses and for groups."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from rl_distributed.batch.arrays import full
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Rewards,
)
from rl_envs.rewards.functional import FunctionalRewardWrapper
from rl_envs.rewards.lists import RewardFns

__all__ = ["GroupRewardWrapper", "as_environment"]

Columns = Mapping[str, Any]


def as_environment(given: Any) -> EnvironmentInterface[Any]:
    """Return an environment unchanged, and wrap reward functions in one.

    Raises:
        RewardError: It is neither.
    """
    if isinstance(given, EnvironmentInterface):
        return given
    return FunctionalRewardWrapper(given)


class GroupRewardWrapper(EnvironmentInterface[Columns | None]):
    """Scores all responses to a prompt together, as by rank, vote or novelty.

    The function takes a batch, as for `FunctionalRewardWrapper`, and is called once per
    prompt: every list holds the finished conversations of one prompt, without those
    that failed. Its rewards are added to those of the environment.

    Args:
        fn: The reward function, or several.
        environment: Environment that first plays and scores each conversation; None:
            the first response ends it.
        deadline_s: Time limit of the asynchronous calls of one group, in seconds.

    Raises:
        RewardSignatureError: The function's parameters cannot be filled.
    """

    def __init__(
        self,
        fn: RewardFns,
        environment: Any = None,
        *,
        deadline_s: float = 600.0,
    ) -> None:
        # Batched whatever its signature: it compares the responses to one prompt.
        self._scorer = FunctionalRewardWrapper(fn, batched=True, deadline_s=deadline_s)
        self._environment = None if environment is None else as_environment(environment)

    def step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> EnvironmentReturn[Columns | None]:
        """Step the environment, or end each conversation with a reward of 0."""
        if self._environment is not None:
            return self._environment.step(message_log_batch, metadata)
        size = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in range(size)],
            metadata=list(metadata),
            next_stop_strings=[None] * size,
            rewards=full(size, 0.0, "float32"),
            terminateds=full(size, True, "bool"),
            answers=None,
        )

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[Columns | None]],
    ) -> list[Rewards] | None:
        """Score the finished conversations of each prompt.

        Raises:
            RewardError: The function raised, or returned invalid rewards.
        """
        return [
            self._scorer.score(logs, rows)
            for logs, rows in zip(message_logs, metadata, strict=True)
        ]

    def unusable_rows(self, metadata: Sequence[Columns | None]) -> dict[int, str]:
        """Return the rows that the environment cannot score."""
        inner = self._environment
        return {} if inner is None else inner.unusable_rows(metadata)

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools of the environment."""
        return [] if self._environment is None else self._environment.tool_schemas()

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the metrics of the environment, or of the rewards."""
        inner = self._environment or self._scorer
        return inner.global_post_process_and_metrics(batch)

    def shutdown(self) -> None:
        """Shut the environment down."""
        if self._environment is not None:
            self._environment.shutdown()
