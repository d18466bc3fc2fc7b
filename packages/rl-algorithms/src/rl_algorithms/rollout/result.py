"""What a rollout gives back.

Shapes: N = prompts x generations rows, S tokens wide. Rows of a prompt are together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from rl_algorithms.data.types import LLMMessageLogType
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.metrics.values import MetricValue

__all__ = ["Outcome", "RolloutResult", "RolloutSample"]


class Outcome(IntEnum):
    """How a trajectory ended. Only the first two are caused by the policy."""

    OK = 0
    """The policy stopped by itself, or the environment ended the conversation."""
    TRUNCATED = 1
    """A limit came first: of length, or of turns where there are several."""
    ENVIRONMENT_ERROR = 2
    """The environment raised or did not score the row: it is not trained on."""
    INFRASTRUCTURE_ERROR = 3
    """A worker died, hung or was too late: the row is not trained on."""
    STALE = 4
    """The weights that sampled it are too old: the row is not trained on."""

    @property
    def is_trainable(self) -> bool:
        """Whether the policy caused this ending."""
        return self <= Outcome.TRUNCATED

    @property
    def is_infrastructure(self) -> bool:
        """Whether the same attempt may end otherwise when it is made again."""
        return self is Outcome.INFRASTRUCTURE_ERROR


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
    """Columns:

    | column | holds |
    |---|---|
    | `input_ids` [N, S], `input_lengths` [N] | tokens of the conversation |
    | `token_mask` [N, S] | 1 on sampled tokens |
    | `generation_logprobs` [N, S] | of sampled tokens; if there are any |
    | `token_versions` [N, S] | weights that sampled the token, -1 elsewhere |
    | `weight_version` [N] | the oldest of them |
    | `sample_mask` [N] | 0 where `outcome` is not trainable |
    | `rewards` [N] | sum over turns and names; 0.0 where nothing was scored |
    | `reward/<name>` [N] | where there are several; NaN where one does not apply |
    | `group_index` [N] | rows of one prompt share it |
    | `outcome` [N] int8, `truncated` [N] bool | how it ended; by a length limit |
    | `generation_lengths`, `num_turns` [N] | sampled tokens, answers |
    | `branches` | tuples of `Branch`; see `unfold_branches` |
    | `texts`, `metadata` | sampled texts; what the environment returned last |
    """
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
