"""What an environment is.

Shapes: B rows in a batch. A row is one conversation.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    TypeAlias,
    TypeVar,
)

import numpy as np

from rl_distributed.batch.arrays import as_array, from_numpy, to_numpy
from rl_envs.batches import takes_batches
from rl_envs.errors import EnvironmentContractError, MessageLogError

if TYPE_CHECKING:
    import torch

__all__ = [
    "EnvironmentInterface",
    "EnvironmentReturn",
    "Message",
    "MessageLog",
    "Observation",
    "Rewards",
    "TRUNCATED_KEY",
    "as_columns",
    "as_rewards",
    "last_response",
    "log_as_text",
    "num_rows",
    "observation_messages",
    "prompt_text",
    "scored_mask",
    "total_reward",
]

Message: TypeAlias = Mapping[str, Any]
"""One message: `role` and `content`, both text; `truncated` is true in a response that
a length limit cut off; other keys belong to others."""
MessageLog: TypeAlias = Sequence[Message]
"""A conversation, oldest message first."""
Observation: TypeAlias = dict[str, str] | list[dict[str, str]]
"""What a conversation goes on with: one message, or several in order."""
Rewards: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"
"""[B] float32 rewards, or several by `reward/<name>`; see `EnvironmentReturn`."""
MetadataT = TypeVar("MetadataT")

TRUNCATED_KEY = "truncated"
"""Key of a response that was cut off, see `Message`."""
_REWARD_PREFIX = "reward/"


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """What an environment answers to a batch of B conversations.

    An environment may give `rewards` and `terminateds` as tensors, numpy arrays or
    lists. The environments here give tensors where torch is installed, and numpy arrays
    where it is not; `as_columns` makes the same of any answer.
    """

    observations: Sequence[Observation]
    """A list with one message (`role`, `content`) per row, or several messages, which
    the conversation goes on with unless the row is terminated. Where all rows are, it
    may be empty."""
    metadata: list[MetadataT]
    """What the environment wants back with the row's next turn."""
    next_stop_strings: list[list[str] | None] | list[None]
    """Texts that end the row's next response; None: no change."""
    rewards: Rewards | Any
    """[B] float32 rewards of this turn, or several by name, each name beginning with
    `reward/`. NaN means that the row was not scored: it is left out of training and
    counted, not taken for a reward of zero. Of several rewards one that is NaN does not
    apply to the row; the row is not scored where all of them are NaN."""
    terminateds: torch.Tensor | Any
    """[B] bool: whether the conversation ends here."""
    answers: list[str | None] | None
    """The answer found in each response, for logs; None: not applicable."""


class EnvironmentInterface(ABC, Generic[MetadataT]):
    """Judges responses and, over several turns, answers them.

    An environment is a plain class: it runs where it is made, or in a process of its
    own through `RemoteEnvironment`. `check_environment` tests an implementation.

    `step` of every environment also takes one argument, a batch as `generate` gives it:
    `environment.step(generations)`. See `conversations_of` for the columns.
    """

    many_turns: ClassVar[bool | None] = None
    """Whether a conversation may go on after a response; None: it does not say. It is
    shown to people, and checked; each row ends where `step` says so."""
    runs_programs: ClassVar[bool] = False
    """Whether responses are run as programs, in `rl_envs.sandbox`."""
    calls_at_once: int = 1
    """Calls that the object takes at the same time, from as many threads. A run that
    samples ahead of training (`grpo.asynchronous`) makes so many, each for the
    conversations that wait; any other run makes one after the other."""

    def __init_subclass__(cls, **settings: Any) -> None:
        """Let `step` be called with a batch alone."""
        super().__init_subclass__(**settings)
        step = inspect.getattr_static(cls, "step", None)  # it may be of a mixin
        if inspect.isfunction(step):
            cls.step = takes_batches(step)  # type: ignore[method-assign]

    @abstractmethod
    def step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[MetadataT],
    ) -> EnvironmentReturn[MetadataT]:
        """Judge the last response of each conversation.

        Rows are independent: the answer to a row does not depend on its neighbours. The
        arguments must not be changed. Both may be empty. A call that raised may be made
        again for some of its rows.

        Args:
            message_log_batch: B conversations, each ending with the response. A
                response that a length limit (`max_new_tokens`) cut off has `truncated`
                true, and the conversation goes on after it like after any other, unless
                it is terminated.
            metadata: B values: columns of the data set in the first turn, then what the
                previous turn returned.
        """

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Look at all finished rows of a step at once.

        Args:
            batch: Columns of equal length; `rewards` is [N], the sum over turns.

        Returns:
            The batch, changed or not, and metrics by name.
        """
        return batch, {}

    def unusable_rows(self, metadata: Sequence[MetadataT]) -> dict[int, str]:
        """Look at rows of a data set before anything is trained on them.

        Args:
            metadata: Columns of rows, as in the first turn of `step`.

        Returns:
            Of the rows that this environment cannot judge, by their index, the reason:
            a column, what it must be, and what it is.
        """
        return {}

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools that a policy may call, as its chat template takes them.

        One mapping per tool: `{"type": "function", "function": {"name": ...,
        "description": ..., "parameters": JSON schema}}`.
        """
        return []

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[MetadataT]],
    ) -> list[Rewards] | None:
        """Judge all finished conversations of each prompt together.

        What comes back is added to the rewards of the turns. Conversations that failed
        are not among those of their prompt.

        Args:
            message_logs: By prompt, the finished conversations.
            metadata: What the last turn of each returned.

        Returns:
            By prompt, rewards of its conversations as in `EnvironmentReturn`; None:
            this environment judges each conversation by itself.
        """
        return None

    def shutdown(self) -> None:
        """Give back what the environment holds; calling it again does nothing."""
        return


def num_rows(message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]) -> int:
    """Return the size of a batch.

    Raises:
        MessageLogError: There is not one entry of metadata for each conversation.
    """
    size = len(message_log_batch)
    if len(metadata) != size:
        raise MessageLogError(
            f"metadata must have one entry per conversation: got {len(metadata)} for "
            f"{size}"
        )
    return size


def last_response(message_log: MessageLog, *, row: int = 0) -> str:
    """Return the text of the last assistant message.

    Raises:
        MessageLogError: There is none.
    """
    for message in reversed(message_log):
        if message.get("role") == "assistant":
            return _content(message, row)
    roles = [message.get("role") for message in message_log]
    raise MessageLogError(
        f"message_log_batch[{row}] must hold an assistant message: got roles {roles}"
    )


def prompt_text(
    message_log: MessageLog, *, row: int = 0, end: int | None = None
) -> str:
    """Return the text before the last assistant message; messages join by newlines.

    Args:
        message_log: The conversation.
        row: Its place in the batch, for messages.
        end: Number of messages of the prompt; None: those before that message.
    """
    if end is None:
        end = len(message_log)
        for index in range(end - 1, -1, -1):
            if message_log[index].get("role") == "assistant":
                end = index
                break
    if end == 1:
        return _content(message_log[0], row)
    return "\n".join(_content(message, row) for message in message_log[:end])


def _content(message: Message, row: int) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise MessageLogError(
            f"message_log_batch[{row}]: a message's content must be text: got "
            f"{type(content).__name__} in a message with keys {sorted(message)}"
        )
    return content


def log_as_text(message_log: MessageLog) -> list[dict[str, Any]]:
    """Return a conversation with `role` and `content` of its messages alone.

    That is what travels to another process: what a policy keeps with a message, such as
    tokens, stays with it.
    """
    return [
        {"role": message.get("role"), "content": message.get("content")}
        for message in message_log
    ]


def observation_messages(observation: Observation) -> list[dict[str, str]]:
    """Return the messages of an observation: one or several."""
    return [observation] if isinstance(observation, dict) else list(observation)


def as_rewards(rewards: Any) -> Rewards:
    """Return rewards as the environments here give them.

    Args:
        rewards: A tensor, which stays as it is, a numpy array or a list of numbers; or
            several by name.

    Raises:
        EnvironmentContractError: They are no numbers.
    """
    if isinstance(rewards, Mapping):
        return {name: _as_column(name, r, "float32") for name, r in rewards.items()}
    return _as_column("rewards", rewards, "float32")


def as_columns(result: EnvironmentReturn[MetadataT]) -> EnvironmentReturn[MetadataT]:
    """Return an answer with rewards and ends as the environments here give them.

    Where all rows have ended, observations that were left out are none for each row.

    Raises:
        EnvironmentContractError: They are neither tensors, nor arrays or lists of one
            number per row; a row that goes on has no observation; or it is no answer.
    """
    if not isinstance(result, EnvironmentReturn):
        raise EnvironmentContractError(
            "step must return an EnvironmentReturn: got "
            f"{type(result).__name__} {result!r:.60}; test the environment with "
            "check_environment"
        )
    ends = _as_column("terminateds", result.terminateds, "bool")
    return result._replace(
        observations=_observations(result.observations, ends),
        rewards=as_rewards(result.rewards),
        terminateds=ends,
    )


def _observations(
    given: Sequence[Observation] | None, ends: torch.Tensor
) -> Sequence[Observation]:
    """Return one observation per row; those that have ended need none."""
    if given is not None and (len(given) or not len(ends)):
        return given
    going_on = (~to_numpy(ends).astype(bool)).nonzero()[0].tolist()
    if going_on:
        raise EnvironmentContractError(
            "observations must have one entry per row, as "
            f"{len(going_on)} of {len(ends)} rows go on (row {going_on[0]} first): got "
            "none; return what each conversation goes on with, or terminated rows"
        )
    return [[] for _ in range(len(ends))]


def _as_column(name: str, values: Any, dtype: str) -> torch.Tensor:
    try:
        column = as_array(values, dtype)
    except (TypeError, ValueError):
        column = None
    if column is None or column.ndim == 0:
        raise EnvironmentContractError(
            f"{name} must be a tensor, a numpy array or a list with one {dtype} per "
            f"row: got {type(values).__name__} {values!r:.60}; test the environment "
            "with check_environment"
        )
    return column


def total_reward(rewards: Rewards | Any) -> torch.Tensor:
    """Return [B] rewards: several rewards add up.

    One that is NaN does not apply and adds nothing; where all are NaN, so is the sum.

    Args:
        rewards: As in `EnvironmentReturn`.

    Raises:
        EnvironmentContractError: They are no numbers.
    """
    given = as_rewards(rewards)
    if not isinstance(given, dict):
        return given
    columns = np.stack([to_numpy(column) for column in given.values()])
    total = np.nansum(columns, axis=0)
    total[np.isnan(columns).all(axis=0)] = np.nan
    return from_numpy(total)


def scored_mask(rewards: Rewards | Any) -> torch.Tensor:
    """Return [B] bool: which rows were scored."""
    return from_numpy(~np.isnan(to_numpy(total_reward(rewards))))
