"""What a rollout gives back.

Shapes: N = prompts x generations rows, S tokens wide. Rows of a prompt are together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from rl_algorithms.data.types import LLMMessageLogType
from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.metrics.values import MetricValue

__all__ = ["Outcome", "RolloutResult", "RolloutSample"]


class Outcome(IntEnum):
    """How a trajectory ended. Only the first two are caused by the policy."""

    OK = 0
    """The policy stopped by itself, or the environment ended the conversation."""
    TRUNCATED = 1
    """A length limit came first."""
    ENVIRONMENT_ERROR = 2
    """The environment failed or did not score the row: it is not trained on."""
    INFRASTRUCTURE_ERROR = 3
    """A worker failed: the row is not trained on."""
    STALE = 4
    """The weights that sampled it are too old: the row is not trained on."""

    @property
    def is_trainable(self) -> bool:
        """Whether the policy caused this ending."""
        return self <= Outcome.TRUNCATED


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One trajectory as people read it."""

    prompt: str
    response: str
    reward: float
    outcome: Outcome
    answer: str | None
    message_log: LLMMessageLogType
    extra_env_info: dict[str, Any]


@dataclass(frozen=True)
class RolloutResult:
    """Rows to train on, metrics, and the texts behind them."""

    rows: BatchedDataDict[Any]
    """Columns: `input_ids` [N, S], `input_lengths` [N], `token_mask` [N, S] (1 on
    sampled tokens), `sample_mask` [N] (0 where the environment failed),
    `generation_logprobs` [N, S], `rewards` [N] (0.0 where it failed), `reward/<name>`
    [N] if there are several, `group_index` [N], `truncated` [N] bool,
    `generation_lengths` [N], `weight_version` [N], `outcome` [N] int8 and `texts`, a
    list of the sampled texts."""
    metrics: dict[str, MetricValue]
    """Typed, so that several rollouts of a step merge exactly."""
    message_logs: list[LLMMessageLogType] = field(repr=False)
    """Each row's conversation as text."""
    num_prompt_messages: list[int] = field(repr=False)
    """How many messages of each row were there before the policy's first."""
    answers: list[str | None] = field(repr=False)
    """What the environment read as each row's answer."""
    extra_env_info: list[dict[str, Any]] = field(repr=False)
    """Columns of each row's dataset row."""

    @cached_property
    def samples(self) -> list[RolloutSample]:
        """Each row as a `RolloutSample`; made when first asked for."""
        return [self.sample(row) for row in range(len(self.message_logs))]

    def sample(self, row: int) -> RolloutSample:
        """Return one row as a `RolloutSample`."""
        log = self.message_logs[row]
        return RolloutSample(
            prompt="\n".join(
                message["content"] for message in log[: self.num_prompt_messages[row]]
            ),
            response=self.rows["texts"][row],
            reward=float(self.rows["rewards"][row]),
            outcome=Outcome(int(self.rows["outcome"][row])),
            answer=self.answers[row],
            message_log=log,
            extra_env_info=self.extra_env_info[row],
        )
