"""Input and result of an agent on one task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from rl_envs.errors import AgentError

__all__ = [
    "AgentHost",
    "AgentJob",
    "AgentLimits",
    "AgentPoll",
    "AgentResult",
    "AgentReward",
    "AgentTask",
    "agent_limits_of",
    "read_reward",
]

MAIN = "main"
"""The conversation of requests that name none."""


@dataclass(frozen=True, eq=False)
class AgentTask(Mapping[str, Any]):
    """The task of an agent: a row of the data set. `task["answer"]` is a column."""

    messages: list[dict[str, Any]]
    """The prompt as messages with `role` and `content`."""
    columns: Mapping[str, Any]
    """All columns of the row."""
    model: str
    """What requests call the policy."""

    @property
    def prompt(self) -> str:
        """The text of the prompt; messages are joined by newlines."""
        return "\n".join(str(message["content"]) for message in self.messages)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


@dataclass(frozen=True)
class AgentReward:
    """What a task earns, where one number does not say it all."""

    reward: float
    """For everything that the policy said in the task."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward consists of, for metrics; they do not add to it."""
    conversations: Mapping[str, float] = field(default_factory=dict)
    """Own rewards of conversations, by the names that requests gave them: what is said
    in one of these is trained on with its own reward, compared with those of the same
    name in other tries at the task."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """What whoever serves the model must know of agents."""

    model_name: str
    """What requests call the policy."""
    max_calls: int
    """Requests of one task."""
    time_limit_s: float
    """Seconds that a task may take."""
    limit_reward: float | None
    """Reward of a task that met a limit; None: it is not trained on."""
    max_at_once: int
    """Tasks that one worker runs at the same time."""


@dataclass(frozen=True, slots=True)
class AgentJob:
    """A task to run."""

    number: int
    """What its result is called."""
    messages: list[dict[str, Any]]
    columns: Mapping[str, Any]
    base_url: str
    """Address of the model."""
    # A job may be shown in a log or an error, where a key must not appear.
    api_key: str = field(repr=False)
    """Key of this task."""
    time_limit_s: float | None = None
    """Seconds that this task may take; None: those of the environment."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How a task ended."""

    number: int
    """Number of its job."""
    ending: Literal["done", "limit", "error"]
    """By itself, by its time limit, or by an exception."""
    reward: AgentReward | None = None
    """None: it ended in an error or by its limit."""
    error: str = ""
    """What was raised, with the place."""


@dataclass(frozen=True, slots=True)
class AgentPoll:
    """What a worker says of its jobs."""

    results: list[AgentResult]
    """Of those that have ended since the last poll."""
    process: str
    """Name of its process: another one has none of the jobs of the one before."""


@runtime_checkable
class AgentHost(Protocol):
    """An environment of agents, in this process or in workers."""

    @property
    def agent_limits(self) -> AgentLimits | None:
        """What bounds the agents; None: the environment judges answers instead."""
        ...

    @property
    def num_agent_workers(self) -> int:
        """Processes that run agents."""
        ...

    def poll_agents(
        self,
        begin: Sequence[AgentJob],
        cancel: Sequence[int],
        wait_s: float,
        worker: int = 0,
    ) -> AgentPoll:
        """Begin and cancel jobs, and return those that have ended.

        Args:
            begin: Jobs to begin.
            cancel: Jobs to end, of which no result is wanted.
            wait_s: How long to wait for the first result.
            worker: Which of the processes.
        """
        ...


def agent_limits_of(environment: object) -> AgentLimits | None:
    """Return the limits of an environment's agents, or None if it runs none."""
    return environment.agent_limits if isinstance(environment, AgentHost) else None


def read_reward(value: Any) -> AgentReward:
    """Return what an agent gave back as a reward.

    Args:
        value: A number, a mapping of numbers that add up, or an `AgentReward`.

    Raises:
        AgentError: It is none of them, or not finite.
    """
    if isinstance(value, AgentReward):
        found = value
    elif isinstance(value, Mapping):
        parts = {str(name): _number(part, str(name)) for name, part in value.items()}
        found = AgentReward(sum(parts.values()), parts)
    else:
        found = AgentReward(_number(value, "reward"))
    numbers = {"reward": found.reward, **found.parts, **found.conversations}
    for name, number in numbers.items():
        if not math.isfinite(_number(number, name)):
            raise AgentError(
                f"the agent's {name} must be a finite number: got {number}"
            )
    return found


def _number(value: Any, name: str) -> float:
    try:
        # A text is no number, though float() reads some.
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise AgentError(
            f"the agent's {name} must be a number: got {type(value).__name__} "
            f"{value!r:.60}; return the reward of the task, a mapping of rewards that "
            "add up, or an AgentReward"
        ) from None
