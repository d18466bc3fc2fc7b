"""Conversations that a worker of an environment judges many at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rl_envs.interfaces import EnvironmentReturn

__all__ = ["RowFailure", "RowHost", "RowJob", "RowPoll", "row_host_of"]


@dataclass(frozen=True, slots=True)
class RowJob:
    """A conversation to be judged."""

    number: int
    """Identifies its verdict."""
    log: Sequence[Mapping[str, Any]]
    """The conversation, ending with the response."""
    metadata: Any
    seed: int | None = None
    """Seed of a conversation that begins, for `reset`; None: it has begun."""


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A conversation without a verdict."""

    number: int
    """Number of its job."""
    error: Exception
    """What the environment raised, or that it took too long."""


@dataclass(frozen=True, slots=True)
class RowPoll:
    """Reply of a worker about its conversations."""

    verdicts: list[tuple[list[int], EnvironmentReturn[Any]]]
    """Numbers of B jobs that have ended, and the reply to them."""
    failures: list[RowFailure]
    process: str
    """Name of its process: another one has none of the jobs of the one before."""


@runtime_checkable
class RowHost(Protocol):
    """An environment whose workers judge many conversations at a time."""

    @property
    def num_row_workers(self) -> int:
        """Number of workers."""
        ...

    @property
    def rows_per_worker(self) -> int:
        """Number of conversations that one worker judges at a time."""
        ...

    def poll_rows(
        self, begin: Sequence[RowJob], wait_s: float, worker: int = 0
    ) -> RowPoll:
        """Begin to judge conversations, and return those that have ended.

        Args:
            begin: Conversations to begin with.
            wait_s: How long to wait for the first verdict, in seconds.
            worker: Index of the worker.

        Raises:
            As `step`.
        """
        ...


def row_host_of(environment: object) -> RowHost | None:
    """Return the environment if its workers judge several conversations at a time."""
    if isinstance(environment, RowHost) and environment.rows_per_worker > 1:
        return environment
    return None
