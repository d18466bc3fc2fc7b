"""Base of worlds with one response and one verdict.

    row of the data set --read_row--> task --+
    conversation --response, prompt----------+--check--> Verdict(score, reason)

```python
@register_env("vowels")
class VowelsEnvironment(VerdictEnvironment[int]):
    def read_row(self, columns: Columns, row: int) -> int:
        return int(columns["answer"])

    def check(self, given: Given[int]) -> Verdict:
        found = sum(given.response.count(letter) for letter in "aeiou")
        return Verdict(float(found == given.task), f"it has {found} vowels")
```
"""

from __future__ import annotations

import re
import unicodedata
from abc import abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from rl_distributed.batch.arrays import as_array, full
from rl_envs.errors import MessageLogError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    last_response,
    num_rows,
    prompt_text,
)
from rl_envs.metrics import reward_metrics

__all__ = [
    "Columns",
    "Given",
    "Verdict",
    "VerdictEnvironment",
    "last_tagged",
    "visible",
    "same_last_line",
]

Columns: TypeAlias = Mapping[str, Any]
TaskT = TypeVar("TaskT")

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_HIDDEN = frozenset({"Cc", "Cf"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """Score of a response and its reason."""

    score: float
    """Reward; 1: correct, NaN: not scored."""
    reason: str
    """Final message of the conversation."""
    answer: str | None = None
    """Answer extracted from the response, for logs."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns added to the row's metadata, beside `correct`."""


@dataclass(frozen=True, slots=True)
class Given(Generic[TaskT]):
    """A response to judge, with its task."""

    response: str
    """The last assistant message."""
    task: TaskT
    """Result of `read_row` for the row."""
    message_log: MessageLog = ()
    """The conversation, ending with the response."""
    row: int = 0
    """Index of the row in the batch, for error messages."""

    @property
    def prompt(self) -> str:
        """Text before the response, with messages joined by newlines.

        Raises:
            MessageLogError: The content of a message is not text.
        """
        return prompt_text(self.message_log, row=self.row)


class VerdictEnvironment(EnvironmentInterface[Columns], Generic[TaskT]):
    """Judges one response per conversation, and ends it.

    Subclasses read rows (`read_row`) and judge responses (`check`, or `check_all` for
    several at a time). The metadata of a judged row has `correct`, True if its score
    is 1.
    """

    many_turns: ClassVar[bool | None] = False

    @abstractmethod
    def read_row(self, columns: Columns, row: int) -> TaskT:
        """Return the task of a row, as needed by `check`.

        Args:
            columns: The row's columns; may not be a mapping if a row has none.
            row: Its index in the batch, for error messages.

        Raises:
            MessageLogError: A column is missing or invalid.
        """

    @abstractmethod
    def check(self, given: Given[TaskT]) -> Verdict:
        """Judge one response; must not raise, whatever the model wrote."""

    def check_all(self, given: Sequence[Given[TaskT]]) -> list[Verdict]:
        """Judge the responses of a batch, one verdict each, in order."""
        return [self.check(one) for one in given]

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Columns]
    ) -> EnvironmentReturn[Columns]:
        """Judge the last response of each conversation.

        Raises:
            MessageLogError: A conversation has no response, or a row lacks a column.
        """
        size = num_rows(message_log_batch, metadata)
        given = [
            Given(
                last_response(log, row=row),
                self.read_row(columns, row),
                log,
                row,
            )
            for row, (log, columns) in enumerate(
                zip(message_log_batch, metadata, strict=True)
            )
        ]
        verdicts = self.check_all(given)
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": verdict.reason}
                for verdict in verdicts
            ],
            metadata=[
                # Exactly 1: partial credit does not count towards accuracy.
                {**columns, **verdict.columns, "correct": verdict.score == 1.0}
                for columns, verdict in zip(metadata, verdicts, strict=True)
            ],
            next_stop_strings=[None] * size,
            rewards=as_array([verdict.score for verdict in verdicts], "float32"),
            terminateds=full(size, True, "bool"),
            answers=[verdict.answer for verdict in verdicts],
        )

    def unusable_rows(self, metadata: Sequence[Columns]) -> dict[int, str]:
        """Return the rows rejected by `read_row`, with its reasons."""
        found: dict[int, str] = {}
        for row, columns in enumerate(metadata):
            try:
                self.read_row(columns, row)
            except MessageLogError as error:
                found[row] = str(error)
        return found

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch unchanged, and metrics.

        `accuracy` is the share of correct responses. If verdicts have the column
        `verified`, `unverified_fraction` is the share whose check did not finish.
        """
        metrics = reward_metrics(batch)
        judged = [
            row for row in batch.get("metadata") or () if "correct" in (row or {})
        ]
        if judged:
            metrics["accuracy"] = sum(row["correct"] for row in judged) / len(judged)
        verified = [row["verified"] for row in judged if "verified" in row]
        if verified:
            metrics["unverified_fraction"] = 1.0 - sum(verified) / len(verified)
        return batch, metrics


def last_tagged(response: str) -> str | None:
    """Return the content of the last `<answer>` tag; None: there is none.

    A missing `</answer>` is tolerated, as generation may stop there.
    """
    tagged = _TAGGED.findall(response)
    return tagged[-1] if tagged else None


def visible(text: str) -> str:
    """Return a text stripped of invisible characters and of surrounding whitespace.

    Invisible are control and format characters, such as a zero-width space; whitespace
    between words is kept.
    """
    # Checked first: newlines and tabs are control characters, too.
    kept = (c for c in text if c.isspace() or unicodedata.category(c) not in _HIDDEN)
    return "".join(kept).strip()


def same_last_line(response: str, answer: str) -> float:
    """Return 1.0 if the last line of a response is the answer, blanks aside."""
    lines = response.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == answer.strip())
