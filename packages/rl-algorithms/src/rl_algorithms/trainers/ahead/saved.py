"""`SavedAhead`: what a checkpoint holds of sampling ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_algorithms.asynchronous.checkpoint_state import saved_rows, without_rows
from rl_algorithms.asynchronous.staleness import StalenessRule
from rl_algorithms.trainers.ahead.answer_files import read_answers, write_answers
from rl_algorithms.trainers.ahead.jobs import FinishedAnswer
from rl_distributed.logs.logging import get_logger

__all__ = ["SavedAhead"]

_logger = get_logger(__name__)


@dataclass(frozen=True)
class SavedAhead:
    """The state of the schedule after a step, and the answers that it names."""

    state: Mapping[str, Any]
    """State of the schedule, as JSON values."""
    answers: Mapping[int, FinishedAnswer] = field(default_factory=dict)
    """Answers that have their rewards, by the task that sampled them."""

    def write(self, checkpoint: Path) -> None:
        """Write the answers into the folder of a checkpoint."""
        left_out = write_answers(checkpoint, self.answers)
        if left_out:
            _logger.info(
                "%d of %d finished answers are sampled again after a resume: they hold "
                "values that are not plain, or an error",
                *(len(left_out), len(self.answers)),
            )

    def within(self, rule: StalenessRule) -> SavedAhead:
        """Return the same without the answers that a lower limit makes too old.

        They are sampled again: the schedule would drop their prompts.
        """
        versions: dict[int, int] = {}
        for answer in self.answers.values():
            oldest = versions.get(answer.prompt, answer.oldest_version)
            versions[answer.prompt] = min(oldest, answer.oldest_version)
        old, kept = set(), 0
        for prompt, version in sorted(versions.items(), key=lambda item: item[1]):
            step = self.state["step"] + kept // rule.num_prompts_per_step
            if rule.is_too_old(version, step):
                old.add(prompt)
            else:
                kept += 1
        rows = {n for n, answer in self.answers.items() if answer.prompt in old}
        left = {n: answer for n, answer in self.answers.items() if n not in rows}
        return SavedAhead(without_rows(self.state, rows), left)

    @classmethod
    def read(cls, state: Mapping[str, Any], checkpoint: Path | None) -> SavedAhead:
        """Return what a checkpoint holds.

        Args:
            state: State of the schedule in it.
            checkpoint: Its folder; None if there is none, and all answers are sampled
                again.
        """
        found = {} if checkpoint is None else read_answers(checkpoint)
        named = saved_rows(state)
        missing = {rows for rows in named if rows not in found}
        answers = {rows: found[rows] for rows in named if rows in found}
        return cls(without_rows(state, missing), answers)
