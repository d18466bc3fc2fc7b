"""What the desks work on."""

from __future__ import annotations

from dataclasses import dataclass

from rl_algorithms.asynchronous.actions import Sample
from rl_algorithms.rollout.open_conversation import OpenConversation
from rl_algorithms.rollout.trajectories import Trajectories

__all__ = ["Job", "Scoring"]


@dataclass(slots=True)
class Job:
    """An answer that is sampled: a conversation with all its turns."""

    asked: Sample
    conversation: OpenConversation
    oldest_version: int | None = None
    """Of its tokens, as the schedule counts versions."""
    newest_version: int | None = None
    is_cancelled: bool = False
    """Whether nobody waits for it any more."""
    played: Trajectories | None = None
    """Its row, once it has its reward."""

    def note_version(self, version: int) -> None:
        """Say which weights sample the next answer."""
        if self.oldest_version is None:
            self.oldest_version = version
        self.newest_version = version


@dataclass(slots=True)
class Scoring:
    """An answer that waits for a verdict of the environment."""

    job: Job
    task: int | None
    """What the schedule calls it; None: the verdict is one between two turns."""
    is_cancelled: bool = False
