"""Worlds of one response and one verdict: what they share.

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
]

Columns: TypeAlias = Mapping[str, Any]
TaskT = TypeVar("TaskT")

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_HIDDEN = frozenset({"Cc", "Cf"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a response is worth, and why."""

    score: float
    """The reward; 1 is right, NaN is not scored."""
    reason: str
    """What the conversation ends with."""
    answer: str | None = None
    """The answer found in the response, for logs."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns that the row's metadata gets beside `correct`."""


@dataclass(frozen=True, slots=True)
class Given(Generic[TaskT]):
    """What is judged."""

    response: str
    """The last assistant message."""
    task: TaskT
    """What `read_row` made of the row."""
    message_log: MessageLog = ()
    """The conversation, which ends with the response."""
    row: int = 0
    """The row's place in the batch, for messages."""

    @property
    def prompt(self) -> str:
        """Text before the response; several messages are joined by newlines.

        Raises:
            MessageLogError: A message holds other things than text.
        """
        return prompt_text(self.message_log, row=self.row)


class VerdictEnvironment(EnvironmentInterface[Columns], Generic[TaskT]):
    """Judges one response per conversation, which ends with it.

    A subclass reads rows (`read_row`) and judges responses (`check`, or `check_all`
    where several are judged at a time). The metadata of a judged row has `correct`:
    whether the score is 1.
    """

    many_turns: ClassVar[bool | None] = False

    @abstractmethod
    def read_row(self, columns: Columns, row: int) -> TaskT:
        """Return what `check` needs of a row.

        Args:
            columns: The row's columns; no mapping where a row has none.
            row: Its place in the batch, for messages.

        Raises:
            MessageLogError: A column is missing or has no meaning.
        """

    @abstractmethod
    def check(self, given: Given[TaskT]) -> Verdict:
        """Judge one response; whatever a model wrote must have a verdict."""

    def check_all(self, given: Sequence[Given[TaskT]]) -> list[Verdict]:
        """Judge the responses of a batch; one verdict each, in order."""
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
                {**columns, **verdict.columns, "correct": verdict.score == 1.0}
                for columns, verdict in zip(metadata, verdicts, strict=True)
            ],
            next_stop_strings=[None] * size,
            rewards=as_array([verdict.score for verdict in verdicts], "float32"),
            terminateds=full(size, True, "bool"),
            answers=[verdict.answer for verdict in verdicts],
        )

    def unusable_rows(self, metadata: Sequence[Columns]) -> dict[int, str]:
        """Return the rows that `read_row` refuses, with its reasons."""
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

        `accuracy` is the share of right responses. Where verdicts have the column
        `verified`, `unverified_fraction` is the share of those that could not be had.
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
    """Return the text of the last `<answer>`; None: there is none.

    It ends at `</answer>`, or where the response does.
    """
    tagged = _TAGGED.findall(response)
    return tagged[-1] if tagged else None


def visible(text: str) -> str:
    """Return a text without characters that nobody sees, and blanks around it.

    Those are control and format characters, such as a zero-width space; line ends, tabs
    and other blanks between words stay.
    """
    kept = (c for c in text if c.isspace() or unicodedata.category(c) not in _HIDDEN)
    return "".join(kept).strip()
