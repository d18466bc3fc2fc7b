"""The items that the desks work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_algorithms.asynchronous.actions import Sample
from rl_algorithms.rollout.agents.conversation import AgentConversation
from rl_algorithms.rollout.open_conversation import OpenConversation
from rl_algorithms.rollout.trajectories import PlayedRow
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec, SamplingParams

__all__ = ["FinishedAnswer", "Job", "Scoring"]


@dataclass(slots=True)
class Job:
    """An answer being sampled: a conversation with all its turns."""

    asked: Sample
    conversation: OpenConversation | AgentConversation
    oldest_version: int | None = None
    """Oldest version of its tokens, by the schedule's count."""
    newest_version: int | None = None
    is_cancelled: bool = False
    """Whether the answer is no longer wanted."""

    def note_version(self, version: int) -> None:
        """Record a weight version that has sampled tokens of the answer."""
        # In any order: requests of an agent that overlap may end in another one.
        oldest, newest = self.oldest_version, self.newest_version
        self.oldest_version = version if oldest is None else min(oldest, version)
        self.newest_version = version if newest is None else max(newest, version)

    @property
    def sampling(self) -> tuple[bool, SamplingParams | None]:
        """Sampling parameters; None for those of the generator."""
        return False, None

    @property
    def opening(self) -> OpenConversation | None:
        """The conversation, while `FirstTurns` can take it; None afterwards."""
        return self.turns if self.turns.is_new else None

    def question(self) -> BatchedDataDict[GenerationDatumSpec]:
        """Return the row that `generate` takes for the next answer."""
        return self.turns.question()

    def answer(self, output: BatchedDataDict[GenerationOutputSpec]) -> None:
        """Take the row that `generate` gave back."""
        self.turns.answer(output)

    def fail(self, error: Exception) -> None:
        """End the conversation, as nothing could be sampled."""
        self.turns.fail(error)

    def begin(self) -> int | None:
        """Return the seed with which the environment begins; None: it has begun."""
        return self.turns.begin()

    def take_ended(self) -> list[Any]:
        """Return the metadata to close, once; none for a conversation of an agent."""
        if isinstance(self.conversation, AgentConversation):
            return []
        return self.turns.take_ended()

    @property
    def turns(self) -> OpenConversation:
        """A conversation whose turns are requested here, unlike those of an agent."""
        assert isinstance(self.conversation, OpenConversation)
        return self.conversation


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """An answer that has its reward, and waits for its step."""

    prompt: int
    """Number of the prompt."""
    sample: int
    """Index among the answers to the prompt."""
    attempts: int
    """Number of attempts that it took."""
    oldest_version: int
    """Oldest version of its tokens, by the schedule's count."""
    played: PlayedRow
    """Its row."""


@dataclass(slots=True)
class Scoring:
    """An answer waiting for a verdict of the environment."""

    job: Job
    task: int | None
    """Number of the schedule's task; None for a verdict between two turns."""
    is_cancelled: bool = False
