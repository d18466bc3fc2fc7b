"""The interface of environments.

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
from rl_envs.task_limits import TaskLimits

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
    "has_own",
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
a length limit cut off; other keys belong to other components."""
MessageLog: TypeAlias = Sequence[Message]
"""A conversation, oldest message first."""
Observation: TypeAlias = dict[str, str] | list[dict[str, str]]
"""The continuation of a conversation: one message, or several in order."""
Rewards: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"
"""[B] float32 rewards, or one tensor per `reward/<name>`; see `EnvironmentReturn`."""
MetadataT = TypeVar("MetadataT")

TRUNCATED_KEY = "truncated"
"""Message key that marks a response as cut off; see `Message`."""
_REWARD_PREFIX = "reward/"


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """The reply of an environment to a batch of B conversations.

    `rewards` and `terminateds` may be tensors, numpy arrays or lists. The built-in
    environments return tensors if torch is installed and numpy arrays otherwise;
    `as_columns` converts any reply to that form.
    """

    observations: Sequence[Observation]
    """One message (`role`, `content`) per row, or a list of messages, appended to the
    conversation unless the row is terminated. May be empty if all rows are."""
    metadata: list[MetadataT]
    """Values passed back to the environment with each row's next turn."""
    next_stop_strings: list[list[str] | None] | list[None]
    """Strings that stop the row's next response; None keeps the current ones."""
    rewards: Rewards | Any
    """[B] float32 rewards of this turn, or several by name, each name beginning with
    `reward/`. NaN means that the row was not scored: it is counted and left out of
    training rather than given a reward of zero. With several rewards, a NaN means that
    this one does not apply to the row; the row is unscored only if all are NaN."""
    terminateds: torch.Tensor | Any
    """[B] bool: True where the conversation ends here."""
    answers: list[str | None] | None
    """The answer extracted from each response, for logs; None: not applicable."""


class EnvironmentInterface(ABC, Generic[MetadataT]):
    """Scores responses and, over several turns, replies to them.

    An environment is a plain class: it runs where it is created, or in a process of its
    own through `RemoteEnvironment`. `check_environment` tests an implementation.

    `step` can also be called with a single batch as returned by `generate`:
    `environment.step(generations)`. See `conversations_of` for the columns.
    """

    many_turns: ClassVar[bool | None] = None
    """True if a conversation may continue after a response; None: undeclared. Shown to
    users and checked by `check_environment`; `step` alone decides when a row ends."""
    runs_programs: ClassVar[bool] = False
    """True if responses are run as programs, in `rl_envs.sandbox`."""
    builds_its_extra: ClassVar[bool] = False
    """True if the extra of its name is installed into an environment of its own when
    first used, so that it need not be installed beside."""
    calls_at_once: int = 1
    """Number of concurrent calls, one per thread, that the object supports. A run that
    samples ahead of training (`grpo.asynchronous`) makes up to this many, each for the
    conversations then waiting; any other run makes one call after another. With
    `env.num_workers`, each worker judges as many conversations at a time, so that they
    wait for slow tools or services together."""
    row_s: float | None = None
    """Mean time of a row in `step`, in seconds, if it is known. The time of a call from
    another process says little about it where processors are busy."""
    task_limits: TaskLimits = TaskLimits()
    """Limits of each task, enforced by rollouts; `env.limits` of a run and the column
    `task_limits` of a row override them."""

    def __init_subclass__(cls, **settings: Any) -> None:
        """Wrap `step` so that it also accepts a single batch."""
        super().__init_subclass__(**settings)
        # Not cls.__dict__: `step` may be inherited from a mixin that is no environment.
        step = inspect.getattr_static(cls, "step", None)
        if inspect.isfunction(step):
            cls.step = takes_batches(step)  # type: ignore[method-assign]

    def reset(
        self, metadata: Sequence[MetadataT], seeds: Sequence[int]
    ) -> Sequence[MetadataT]:
        """Begin conversations, before the first `step` of each.

        State belongs into the metadata: a process that dies is replaced, and any
        process may get the next turn. What a process keeps beside it may be kept for
        speed, until `close`.

        Args:
            metadata: B values: columns of the data set.
            seeds: B seeds, not negative; those of a prompt's conversations in a step
                are equal, so that its answers are compared from the same start.

        Returns:
            B values for the first `step`.
        """
        return metadata

    def close(self, metadata: Sequence[MetadataT]) -> None:
        """Release what is kept for conversations that have ended, for any reason.

        It is called in each process, and may be called again. Groups are scored
        afterwards.

        Args:
            metadata: Their latest metadata.
        """
        return

    @abstractmethod
    def step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[MetadataT],
    ) -> EnvironmentReturn[MetadataT]:
        """Score the last response of each conversation.

        Rows are independent: the result for one must not depend on its neighbours. Do
        not modify the arguments. Both may be empty. A call that raised may be repeated
        for some of its rows.

        Args:
            message_log_batch: B conversations, each ending with the response. A
                response cut off by a length limit (`max_new_tokens`) has `truncated`
                set; the conversation continues after it like after any other, unless
                it is terminated.
            metadata: B values: columns of the data set in the first turn, then the
                metadata returned by the previous turn.
        """

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Post-process all finished rows of a training step together.

        Args:
            batch: Columns of equal length; `rewards` is [N], the sum over turns.

        Returns:
            The batch, possibly modified, and metrics by name.
        """
        return batch, {}

    def unusable_rows(self, metadata: Sequence[MetadataT]) -> dict[int, str]:
        """Find data set rows that this environment cannot score, before training.

        Args:
            metadata: Columns of rows, as in the first turn of `step`.

        Returns:
            A reason for each unusable row, by its index: the column, the rule that it
            breaks, and its value.
        """
        return {}

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools that a policy may call, in the form chat templates expect.

        One mapping per tool: `{"type": "function", "function": {"name": ...,
        "description": ..., "parameters": JSON schema}}`.
        """
        return []

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[MetadataT]],
    ) -> list[Rewards] | None:
        """Score all finished conversations of each prompt together.

        The returned rewards are added to those of the turns. Failed conversations are
        left out of their prompt's group.

        Args:
            message_logs: For each prompt, its finished conversations.
            metadata: For each prompt, the metadata of each conversation's last turn.

        Returns:
            For each prompt, the rewards of its conversations as in
            `EnvironmentReturn`; None if this environment does not score groups.
        """
        return None

    def shutdown(self) -> None:
        """Release the environment's resources; calling it again does nothing."""
        return


def has_own(environment: EnvironmentInterface[Any], method: str) -> bool:
    """Return whether an environment has its own `reset` or `close` of conversations.

    One that takes other arguments, such as a `close()` that releases a file, is the
    class's own affair and is not called. An environment that stands for another one
    answers for it by a method `has_own(method)`.

    Args:
        environment: The environment.
        method: `reset` or `close`.
    """
    asked = getattr(environment, "has_own", None)
    if asked is not None:
        return bool(asked(method))
    base = getattr(EnvironmentInterface, method)
    own = getattr(type(environment), method, base)
    if own is base:
        return False
    arguments = [()] * (2 if method == "reset" else 1)
    try:
        inspect.signature(getattr(environment, method)).bind(*arguments)
    except TypeError:
        return False
    return True


def num_rows(message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]) -> int:
    """Return the size of a batch.

    Raises:
        MessageLogError: The number of metadata entries differs.
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
    """Return the text before the last assistant message, joined by newlines.

    Args:
        message_log: The conversation.
        row: Its index in the batch, for error messages.
        end: Number of messages in the prompt; None: all before that message.
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
    """Return a conversation reduced to the `role` and `content` of its messages.

    Only these are sent to other processes; anything else that a policy attaches to a
    message, such as its tokens, stays in this one.
    """
    return [
        {"role": message.get("role"), "content": message.get("content")}
        for message in message_log
    ]


def observation_messages(observation: Observation) -> list[dict[str, str]]:
    """Return the messages of an observation: one or several."""
    return [observation] if isinstance(observation, dict) else list(observation)


def as_rewards(rewards: Any) -> Rewards:
    """Convert rewards to the form that the built-in environments return.

    Args:
        rewards: A tensor, which is returned unchanged, a numpy array or a list of
            numbers; or a mapping of these by name.

    Raises:
        EnvironmentContractError: They are not numbers.
    """
    if isinstance(rewards, Mapping):
        # float32 whatever the environment computes in: rewards are stacked with those
        # of others, and a mix of dtypes would depend on which environment came first.
        return {name: _as_column(name, r, "float32") for name, r in rewards.items()}
    return _as_column("rewards", rewards, "float32")


def as_columns(result: EnvironmentReturn[MetadataT]) -> EnvironmentReturn[MetadataT]:
    """Convert the columns of a reply to the form of the built-in environments.

    If all rows have ended, missing observations become one empty list per row.

    Raises:
        EnvironmentContractError: The reply is not an `EnvironmentReturn`; rewards or
            terminateds are not tensors, arrays or lists of one number per row; or a row
            that continues has no observation.
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
    """Return one observation per row; rows that have ended need none."""
    if given is not None and (len(given) or not len(ends)):
        return given
    continuing = (~to_numpy(ends).astype(bool)).nonzero()[0].tolist()
    if continuing:
        raise EnvironmentContractError(
            "observations must have one entry per row, as "
            f"{len(continuing)} of {len(ends)} rows continue (row {continuing[0]} "
            "first): got none; return the next message of each conversation, or "
            "terminate the rows"
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
    """Return [B] rewards, summing several rewards into one.

    A NaN does not apply to its row and adds nothing; if all are NaN, so is the sum.

    Args:
        rewards: As in `EnvironmentReturn`.

    Raises:
        EnvironmentContractError: They are not numbers.
    """
    given = as_rewards(rewards)
    if not isinstance(given, dict):
        return given
    columns = np.stack([to_numpy(column) for column in given.values()])
    total = np.nansum(columns, axis=0)
    # nansum of nothing but NaN is 0, which would train an unscored row as a failure.
    total[np.isnan(columns).all(axis=0)] = np.nan
    return from_numpy(total)


def scored_mask(rewards: Rewards | Any) -> torch.Tensor:
    """Return [B] bool: True where a row was scored."""
    return from_numpy(~np.isnan(to_numpy(total_reward(rewards))))
