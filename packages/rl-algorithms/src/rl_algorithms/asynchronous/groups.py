"""`Group`: the answers to a prompt, from its admission to its step."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from rl_algorithms.asynchronous.prompt_order import Prompt
from rl_algorithms.asynchronous.workers import Worker

__all__ = ["Answer", "AnswerName", "AnswerPhase", "Group"]


class AnswerName(NamedTuple):
    """Identity of an answer; its seeds depend on this alone, not on its generator.

    The seed of a turn is `row_seeds(seed, step, prompt, sample + attempt * 2**32,
    turn)`, the same as in a synchronous run that has lost no group.
    """

    step: int
    """Step that would train on the prompt in a synchronous run."""
    prompt: int
    """Index of the prompt within that step."""
    sample: int
    """Index among the answers to the prompt."""
    attempt: int
    """Number of earlier attempts with other seeds."""


class AnswerPhase(StrEnum):
    """Progress of an answer."""

    # Strings, because a plain member computes its hash in Python at each look-up.

    UNSENT = "unsent"
    SAMPLING = "sampling"
    SAMPLED = "sampled"
    SCORING = "scoring"
    SCORED = "scored"


class Answer:
    """One answer of a group.

    Args:
        sample: Index in the group.
        seed_attempt: `AnswerName.attempt`.
    """

    # A large run holds tens of thousands of these, and a dictionary each would cost
    # more than the values.
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
        """Failed attempts, at sampling and at scoring."""
        self.failed_on: Worker | None = None
        """Worker on which the last attempt failed."""
        self.rows: int | None = None
        """Task that sampled the answer; the driver keeps its rows under this number."""
        self.newest_version: int | None = None
        self.num_tokens, self.reward = 0, 0.0
        self.group: Group | None = None
        """Group that is notified of changes."""
        self._phase = AnswerPhase.UNSENT
        self._oldest_version: int | None = None

    @property
    def phase(self) -> AnswerPhase:
        """Progress of the answer."""
        return self._phase

    @phase.setter
    def phase(self, phase: AnswerPhase) -> None:
        before, self._phase = self._phase, phase
        if self.group is not None:
            self.group.note_phase(before, phase)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token; a lower bound while the answer is sampled."""
        return self._oldest_version

    @oldest_version.setter
    def oldest_version(self, version: int | None) -> None:
        self._oldest_version = version
        if self.group is not None:
            self.group.note_version()

    def begin_again(self) -> None:
        """Discard the sample but keep the count of attempts."""
        self.rows = self.newest_version = None
        self.num_tokens, self.reward = 0, 0.0
        self.phase, self.oldest_version = AnswerPhase.UNSENT, None


_Watch = Callable[["Group", AnswerPhase | None, AnswerPhase | None], None]


class Group:
    """A prompt with its answers, which are trained on together or not at all.

    Counts are updated as answers change, because the schedule reads them at each event
    and a run may hold tens of thousands of answers.

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
        "number",
        "placed_on",
        "prompt",
    )

    def __init__(self, prompt: Prompt, answers: list[Answer]) -> None:
        self.prompt, self.answers = prompt, answers
        self.number = prompt.number
        """Number of the prompt."""
        self.placed_on: Worker | None = None
        """Generator of the last answer, whose cache already holds the prompt."""
        self._counts = dict.fromkeys(AnswerPhase, 0)
        self._watch: _Watch | None = None
        self._oldest_version: int | None = None
        self._versions_changed = True
        for answer in answers:
            self._counts[answer.phase] += 1
            answer.group = self

    def note_phase(self, before: AnswerPhase, after: AnswerPhase) -> None:
        """Update the counts after an answer has changed its phase."""
        self._counts[before] -= 1
        self._counts[after] += 1
        if self._watch is not None:
            self._watch(self, before, after)

    def note_version(self) -> None:
        """Recompute the oldest version the next time it is read."""
        if self._versions_changed:
            return
        self._versions_changed = True
        if self._watch is not None:
            self._watch(self, None, None)

    def watch(self, watch: _Watch) -> None:
        """Call `watch` after each change of a phase or of the oldest version.

        Args:
            watch: Takes the group and the phases that an answer has left and entered,
                None for a change of the version.
        """
        self._watch = watch
        for answer in self.answers:
            answer.group = self
        self._versions_changed = True

    def settle(self) -> None:
        """Stop counting: the answers no longer change.

        This breaks the reference cycle between a group and its answers, so that the
        group is freed at once and not at the next run of the garbage collector.
        """
        self._watch = None
        for answer in self.answers:
            answer.group = None

    def has(self, phase: AnswerPhase) -> bool:
        """Return whether an answer is in this phase."""
        return self._counts[phase] > 0

    def answers_in(self, phase: AnswerPhase) -> list[Answer]:
        """Return the answers in a phase, in their order."""
        return [answer for answer in self.answers if answer.phase is phase]

    @classmethod
    def of(cls, prompt: Prompt, num_generations: int) -> Group:
        """Return a group without any sampled answer."""
        return cls(prompt, [Answer(sample) for sample in range(num_generations)])

    @property
    def is_finished(self) -> bool:
        """Whether every answer is scored."""
        return self._counts[AnswerPhase.SCORED] == len(self.answers)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token of all answers; None if nothing is sampled."""
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
        """Tasks whose rows the driver keeps for the group, in the order of answers."""
        return tuple(a.rows for a in self.answers if a.rows is not None)

    def name_of(self, answer: Answer, num_prompts_per_step: int) -> AnswerName:
        """Return the identity of an answer."""
        step, place = divmod(self.number, num_prompts_per_step)
        return AnswerName(step, place, answer.sample, answer.seed_attempt)
