"""`Group`: the answers of a prompt, from its admission to its step."""

from __future__ import annotations

from collections.abc import Callable
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


class Answer:
    """One answer of a group.

    Args:
        sample: Its place in the group.
        seed_attempt: `AnswerName.attempt`.
    """

    __slots__ = (
        "_oldest_version",
        "_phase",
        "failed_on",
        "failures",
        "group",
        "newest_version",
        "num_tokens",
        "reward",
        "rows",
        "sample",
        "seed_attempt",
    )

    def __init__(self, sample: int, seed_attempt: int = 0) -> None:
        self.sample, self.seed_attempt = sample, seed_attempt
        self.failures = 0
        """Attempts that came to nothing, of sampling and of scoring."""
        self.failed_on: Worker | None = None
        """Where the last attempt failed."""
        self.rows: int | None = None
        """Task that sampled it: the driver keeps its rows under this number."""
        self.newest_version: int | None = None
        self.num_tokens, self.reward = 0, 0.0
        self.group: Group | None = None
        """The group that counts it."""
        self._phase = AnswerPhase.UNSENT
        self._oldest_version: int | None = None

    @property
    def phase(self) -> AnswerPhase:
        """How far it is."""
        return self._phase

    @phase.setter
    def phase(self, phase: AnswerPhase) -> None:
        before, self._phase = self._phase, phase
        if self.group is not None:
            self.group.note_phase(before, phase)

    @property
    def oldest_version(self) -> int | None:
        """Version of its oldest token; while it is sampled, the least that can be."""
        return self._oldest_version

    @oldest_version.setter
    def oldest_version(self, version: int | None) -> None:
        self._oldest_version = version
        if self.group is not None:
            self.group.note_version()

    def begin_again(self) -> None:
        """Forget what was sampled, but not how often it was tried."""
        self.rows = self.newest_version = None
        self.num_tokens, self.reward = 0, 0.0
        self.phase, self.oldest_version = AnswerPhase.UNSENT, None


class Group:
    """A prompt with its answers; they are trained on together or not at all.

    It counts its answers as they change: the schedule asks at each event, and a run may
    have ten thousands of them.

    Args:
        prompt: The prompt.
        answers: Its answers.
    """

    __slots__ = (
        "_counts",
        "_oldest_version",
        "_versions_changed",
        "_watch",
        "answers",
        "placed_on",
        "prompt",
    )

    def __init__(self, prompt: Prompt, answers: list[Answer]) -> None:
        self.prompt, self.answers = prompt, answers
        self.placed_on: Worker | None = None
        """Generator that got its last answer: it has computed the prompt already."""
        self._counts = dict.fromkeys(AnswerPhase, 0)
        self._watch: Callable[[Group], None] | None = None
        self._oldest_version: int | None = None
        self._versions_changed = True
        for answer in answers:
            self._counts[answer.phase] += 1
            answer.group = self

    def note_phase(self, before: AnswerPhase, after: AnswerPhase) -> None:
        """Count an answer that is in another phase now."""
        self._counts[before] -= 1
        self._counts[after] += 1
        if self._watch is not None:
            self._watch(self)

    def note_version(self) -> None:
        """Look for the oldest version again when it is asked for."""
        self._versions_changed = True

    def watch(self, watch: Callable[[Group], None]) -> None:
        """Call this after each change of a phase."""
        self._watch = watch

    def settle(self) -> None:
        """Count no more, as the answers do not change any more.

        Without a circle of references a group is freed as soon as it is trained on.
        """
        self._watch = None
        for answer in self.answers:
            answer.group = None

    def has(self, phase: AnswerPhase) -> bool:
        """Return whether an answer is in this phase."""
        return self._counts[phase] > 0

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
        return self._counts[AnswerPhase.SCORED] == len(self.answers)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token of all answers; None: nothing is sampled."""
        if self._versions_changed:
            versions = [
                answer.oldest_version
                for answer in self.answers
                if answer.oldest_version is not None
            ]
            self._oldest_version = min(versions, default=None)
            self._versions_changed = False
        return self._oldest_version

    @property
    def rows(self) -> tuple[int, ...]:
        """What the driver keeps for the group, by answer."""
        return tuple(a.rows for a in self.answers if a.rows is not None)

    def name_of(self, answer: Answer, num_prompts_per_step: int) -> AnswerName:
        """Return the name of an answer."""
        step, place = divmod(self.number, num_prompts_per_step)
        return AnswerName(step, place, answer.sample, answer.seed_attempt)
