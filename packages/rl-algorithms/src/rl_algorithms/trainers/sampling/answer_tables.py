"""Tables of answers of training steps and validations, for experiment trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_distributed.metrics import LoggerFacade

__all__ = ["ROLLOUTS_TABLE", "VALIDATION_TABLE", "AnswerTables"]

ROLLOUTS_TABLE = "train/rollouts"
VALIDATION_TABLE = "val/samples"
# Columns in their order; a column without any value is left out. Tokens and their
# log-probs are not included, because no tracker shows them well.
_COLUMNS = (
    "dataset",
    "group",
    "prompt",
    "response",
    "conversation",
    "expected",
    "reward",
    "rewards",
    "advantage",
    "outcome",
    "ending",
    "length",
    "versions",
)


class AnswerTables:
    """Logs the answers in the run folder as tables, too, if a sink can show them.

    Args:
        metrics: The sinks.
        every: Number of steps between two tables of training steps; 0 for no tables at
            all, including those of validations.
    """

    def __init__(self, metrics: LoggerFacade, every: int) -> None:
        self._metrics, self._every = metrics, every

    def add_rollouts(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Log answers of a training step, if it is the first or a table is due.

        Args:
            step: Number of the step, from 1.
            answers: Records of `KeptAnswers`.
        """
        # The first step too, since mistakes in prompts and rewards show at once.
        if self._every and (step == 1 or step % self._every == 0):
            self._log(ROLLOUTS_TABLE, step, answers)

    def add_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log answers of a validation.

        Args:
            step: Number of steps before the validation.
            samples: Records of `ValidationSamples`.
        """
        if self._every:
            self._log(VALIDATION_TABLE, step, samples)

    def _log(self, name: str, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        if not records or not self._metrics.shows_tables:
            return
        shown = [_shown(record) for record in records]
        columns = [c for c in _COLUMNS if any(r.get(c) is not None for r in shown)]
        rows = [[step, *(record.get(c) for c in columns)] for record in shown]
        self._metrics.log_table(name, ["step", *columns], rows, step)


def _shown(record: Mapping[str, Any]) -> Mapping[str, Any]:
    messages = record.get("messages")
    return {**record, "conversation": messages and _conversation(messages)}


def _conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(
        f"{message['role']}: {message['content']}"
        + "".join(
            f"\n{json.dumps(call, ensure_ascii=False, default=str)}"
            for call in message.get("tool_calls", ())
        )
        for message in messages
    )
