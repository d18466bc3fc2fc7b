"""The result of a rollout.

Shapes: N = prompts x generations rows, S tokens wide. Rows of a prompt are adjacent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict

from torch import Tensor

from rl_algorithms.data.types import LLMMessageLogType
from rl_algorithms.rollout.branches import Branch
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.batch.schema import ColumnSpec, Schema
from rl_distributed.metrics.values import MetricValue
from rl_envs.outcomes import ConversationOutcome

__all__ = [
    "TRAJECTORIES",
    "Outcome",
    "RolloutResult",
    "RolloutSample",
    "TrajectorySpec",
]


class Outcome(IntEnum):
    """Use of a trajectory for training. Only the first two are caused by the policy.

    What exactly ended it is a `ConversationOutcome`, in the column `ending`.
    """

    OK = 0
    """The policy stopped by itself, or the environment ended the conversation."""
    TRUNCATED = 1
    """A limit of length or turns ended the conversation first."""
    ENVIRONMENT_ERROR = 2
    """The environment raised or did not score the row, which is not trained on."""
    INFRASTRUCTURE_ERROR = 3
    """A worker died, hung or missed its deadline; the row is not trained on."""
    STALE = 4
    """The weights that sampled the row are too old; it is not trained on."""

    @property
    def is_trainable(self) -> bool:
        """Whether the policy caused this ending."""
        return self <= Outcome.TRUNCATED

    @property
    def is_infrastructure(self) -> bool:
        """Whether the same attempt may succeed when repeated."""
        return self is Outcome.INFRASTRUCTURE_ERROR


class TrajectorySpec(TypedDict):
    """Columns of played rows.

    A reward of several parts also has a column `reward/<name>` [N] for each of them,
    with NaN where a part does not apply.
    """

    input_ids: Annotated[Tensor, ColumnSpec(("rows", "tokens"), "integer")]
    """Tokens of the conversation, right-padded."""
    input_lengths: Annotated[Tensor, ColumnSpec(("rows",), "integer")]
    """Number of tokens of the row."""
    token_mask: Annotated[Tensor, ColumnSpec(("rows", "tokens"), "number")]
    """1 on sampled tokens, 0 elsewhere."""
    generation_logprobs: NotRequired[
        Annotated[Tensor, ColumnSpec(("rows", "tokens"), "float")]
    ]
    """Log-probs of the sampled tokens, if the generator returned them."""
    token_versions: Annotated[Tensor, ColumnSpec(("rows", "tokens"), "integer")]
    """Version of the weights that sampled the token; -1 elsewhere."""
    weight_version: Annotated[Tensor, ColumnSpec(("rows",), "integer")]
    """Oldest version of the row's tokens."""
    sample_mask: Annotated[Tensor, ColumnSpec(("rows",), "number")]
    """0 where `outcome` is not trainable."""
    rewards: Annotated[Tensor, ColumnSpec(("rows",), "float")]
    """Sum over turns and names; 0.0 where nothing was scored."""
    group_index: Annotated[Tensor, ColumnSpec(("rows",), "integer")]
    """Rows of one prompt share it."""
    outcome: Annotated[Tensor, ColumnSpec(("rows",), "int8")]
    """Ending of the row, an `Outcome`."""
    truncated: Annotated[Tensor, ColumnSpec(("rows",), "bool")]
    """Whether a length limit ended the row."""
    generation_lengths: Annotated[Tensor, ColumnSpec(("rows",), "integer")]
    """Number of sampled tokens."""
    num_turns: Annotated[Tensor, ColumnSpec(("rows",), "integer")]
    """Number of answers."""
    branches: Annotated[list[tuple[Branch, ...]], ColumnSpec(("rows",), "list")]
    """Parts before the template rewrote messages; see `unfold_branches`."""
    texts: Annotated[list[str], ColumnSpec(("rows",), "list")]
    """Sampled text of the row."""
    metadata: Annotated[list[Any], ColumnSpec(("rows",), "list")]
    """Metadata that the environment returned last."""
    ending: Annotated[list[ConversationOutcome], ColumnSpec(("rows",), "list")]
    """What ended the conversation: the task solved, a limit, an error, ..."""


TrajectoryRows: TypeAlias = BatchedDataDict[TrajectorySpec]
"""Played rows, with any further columns."""
TRAJECTORIES = Schema.of(TrajectorySpec, "played rows")


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One trajectory in readable form."""

    prompt: str
    response: str
    reward: float
    outcome: Outcome
    ending: ConversationOutcome
    answer: str | None
    message_log: LLMMessageLogType
    extra_env_info: dict[str, Any]


@dataclass(frozen=True)
class RolloutResult:
    """Rows to train on, metrics, and the texts behind them."""

    rows: TrajectoryRows
    """The columns of `TrajectorySpec`."""
    metrics: dict[str, MetricValue]
    """Typed, so that several rollouts of a step merge exactly."""
    message_logs: list[LLMMessageLogType] = field(repr=False)
    """Each row's conversation as text."""
    num_prompt_messages: list[int] = field(repr=False)
    """Number of messages of each row before the policy's first."""
    answers: list[str | None] = field(repr=False)
    """Answer of each row as the environment extracted it."""
    extra_env_info: list[dict[str, Any]] = field(repr=False)
    """Columns of each row's row in the data set."""

    @cached_property
    def samples(self) -> list[RolloutSample]:
        """All rows as `RolloutSample`, created on first use."""
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
            ending=self.rows["ending"][row],
            answer=self.answers[row],
            message_log=log,
            extra_env_info=self.extra_env_info[row],
        )
