"""The items that the desks work on."""

from __future__ import annotations

from dataclasses import dataclass

from rl_algorithms.asynchronous.actions import Sample
from rl_algorithms.rollout.open_conversation import OpenConversation
from rl_algorithms.rollout.trajectories import Trajectories

__all__ = ["Job", "Scoring"]


@dataclass(slots=True)
class Job:
    """An answer being sampled: a conversation with all its turns."""

    asked: Sample
    conversation: OpenConversation
    oldest_version: int | None = None
    """Oldest version of its tokens, by the schedule's count."""
    newest_version: int | None = None
    is_cancelled: bool = False
    """Whether the answer is no longer wanted."""
    played: Trajectories | None = None
    """The finished row, once it has its reward."""

    def note_version(self, version: int) -> None:
        """Record the weight version that samples the next turn."""
        if self.oldest_version is None:
            self.oldest_version = version
        self.newest_version = version


@dataclass(slots=True)
class Scoring:
    """An answer waiting for a verdict of the environment."""

    job: Job
    task: int | None
    """Number of the schedule's task; None for a verdict between two turns."""
    is_cancelled: bool = False
