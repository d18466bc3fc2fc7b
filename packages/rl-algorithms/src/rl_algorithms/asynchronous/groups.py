"""`Group`: the answers of a prompt, from its admission to its step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from rl_algorithms.asynchronous.prompt_order import Prompt
from rl_algorithms.asynchronous.workers import Worker

__all__ = ["Answer", "AnswerName", "AnswerPhase", "Group"]


class AnswerName(NamedTuple):
    """Which answer it is, whoever samples it: its seeds follow from this alone.

    The seed of a turn is `row_seeds(seed, step, prompt, sample + attempt * 2**32,
    turn)`, the same as in a synchronous run that has lost no group.
    """

    step: int
    """The step that takes the prompt in a synchronous run."""
    prompt: int
    """Place of the prompt in that step."""
    sample: int
    """Place among the answers of the prompt."""
    attempt: int
    """How often it was sampled with another seed before."""


class AnswerPhase(Enum):
    """How far an answer is."""

    UNSENT = "unsent"
    SAMPLING = "sampling"
    SAMPLED = "sampled"
    SCORING = "scoring"
    SCORED = "scored"


@dataclass(slots=True)
class Answer:
    """One answer of a group."""

    sample: int
    phase: AnswerPhase = AnswerPhase.UNSENT
    seed_attempt: int = 0
    """`AnswerName.attempt`."""
    failures: int = 0
    """Attempts that came to nothing, of sampling and of scoring."""
    failed_on: Worker | None = None
    """Where the last attempt failed."""
    rows: int | None = None
    """Task that sampled it: the driver keeps its rows under this number."""
    oldest_version: int | None = None
    """Version of its oldest token; while it is sampled, the least that can be."""
    newest_version: int | None = None
    num_tokens: int = 0
    reward: float = 0.0

    def begin_again(self) -> None:
        """Forget what was sampled, but not how often it was tried."""
        self.phase, self.rows = AnswerPhase.UNSENT, None
        self.oldest_version = self.newest_version = None
        self.num_tokens, self.reward = 0, 0.0


@dataclass(slots=True)
class Group:
    """A prompt with its answers; they are trained on together or not at all."""

    prompt: Prompt
    answers: list[Answer]
    placed_on: Worker | None = field(default=None)
    """Generator that got its last answer: it has computed the prompt already."""

    @classmethod
    def of(cls, prompt: Prompt, num_generations: int) -> Group:
        """Return a group of which nothing is sampled."""
        return cls(prompt, [Answer(sample) for sample in range(num_generations)])

    @property
    def number(self) -> int:
        """Number of the prompt."""
        return self.prompt.number

    @property
    def is_finished(self) -> bool:
        """Whether each answer is scored."""
        return all(answer.phase is AnswerPhase.SCORED for answer in self.answers)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token of all answers; None: nothing is sampled."""
        versions = [
            answer.oldest_version
            for answer in self.answers
            if answer.oldest_version is not None
        ]
        return min(versions, default=None)

    @property
    def rows(self) -> tuple[int, ...]:
        """What the driver keeps for the group, by answer."""
        return tuple(a.rows for a in self.answers if a.rows is not None)

    def name_of(self, answer: Answer, num_prompts_per_step: int) -> AnswerName:
        """Return the name of an answer."""
        step, place = divmod(self.number, num_prompts_per_step)
        return AnswerName(step, place, answer.sample, answer.seed_attempt)
