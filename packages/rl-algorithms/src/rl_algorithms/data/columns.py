"""Find the columns of prompts, answers and conversations in a dataset."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.types import Row, Rows
from rl_algorithms.errors import ColumnError
from rl_distributed.suggestion import did_you_mean

__all__ = [
    "MESSAGES_NAMES",
    "PROMPT_NAMES",
    "ColumnMap",
    "answer_column",
    "find_column",
    "find_columns",
    "messages_of",
    "text_of",
]

PROMPT_NAMES = ("prompt", "question", "problem", "input", "instruction", "query")
_ANSWER_NAMES = (
    "answer",
    "completion",
    "response",
    "output",
    "solution",
    "target",
    "ground_truth",
)
MESSAGES_NAMES = ("messages", "conversations", "conversation")


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """Names of the columns to read; None where the dataset has no such column."""

    prompt: str | None
    answer: str | None
    messages: str | None
    text: str | None


def find_columns(rows: Rows, config: DataConfig, name: str) -> ColumnMap:
    """Find the columns by their configured or usual names.

    Raises:
        ColumnError: A configured column is missing, or no row can be read.
    """
    # The first row stands for all; one that differs fails when it is read.
    present = list(rows[0])
    found = ColumnMap(
        prompt=find_column("input_key", config.input_key, PROMPT_NAMES, present, name),
        answer=find_column(
            "output_key", config.output_key, _ANSWER_NAMES, present, name
        ),
        messages=find_column(
            "messages_key", config.messages_key, MESSAGES_NAMES, present, name
        ),
        text=find_column("text_key", config.text_key, ("text",), present, name),
    )
    # A configured conversation wins over a prompt column that only has a usual name.
    if config.messages_key is not None and config.input_key is None:
        found = ColumnMap(None, found.answer, found.messages, None)
    if found.prompt is None and found.messages is None and found.text is None:
        raise ColumnError(
            f"dataset {name} has no column for the prompt: looked for "
            f"{', '.join((*PROMPT_NAMES, *MESSAGES_NAMES, 'text'))}, and it has "
            f"{', '.join(map(repr, present))}; set data.input_key (or "
            "data.messages_key, data.text_key)"
        )
    return found


def find_column(
    key: str,
    configured: str | None,
    usual: Sequence[str],
    present: list[str],
    name: str,
) -> str | None:
    """Return the column that `data.<key>` names, else the first usual one present.

    Raises:
        ColumnError: The dataset lacks the configured column.
    """
    if configured is None:
        return next((column for column in usual if column in present), None)
    if configured in present:
        return configured
    raise ColumnError(
        f"data.{key}={configured!r}: dataset {name} has no such column"
        f"{did_you_mean(configured, present)}; it has "
        f"{', '.join(map(repr, present))}"
    )


def answer_column(columns: ColumnMap, row: Row, name: str) -> str:
    """Return the column of the answers to imitate.

    Raises:
        ColumnError: There is only a prompt.
    """
    if columns.answer is None:
        raise ColumnError(
            f"dataset {name} has a prompt ({columns.prompt or 'prompt'!r}) but no "
            f"column for the answer: it has {', '.join(map(repr, row))}; set "
            "data.output_key"
        )
    return columns.answer


def text_of(row: Row, column: str, index: int, name: str) -> str:
    """Return a text cell; numbers are converted to text.

    Raises:
        ColumnError: The cell is missing or holds something else.
    """
    value = row.get(column)
    if isinstance(value, str):
        return _whole(value, column, index, name)
    # NaN is what data frames have in place of a missing text.
    is_missing = value is None or (isinstance(value, float) and math.isnan(value))
    # Answers to math problems are often stored as numbers.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not is_missing:
        return str(value)
    raise ColumnError(
        f"dataset {name}, row {index}: column {column!r} must be text: got "
        f"{'nothing' if is_missing else type(value).__name__}"
    )


def messages_of(row: Row, column: str, index: int, name: str) -> list[dict[str, str]]:
    """Return a cell of messages, each with `role` and `content`.

    Raises:
        ColumnError: The cell is not a list of messages.
    """
    value = row.get(column)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ColumnError(
            f"dataset {name}, row {index}: column {column!r} must be a list of "
            f"messages with role and content: got {value!r:.80}"
        )
    return [
        _message(item, place, column, index, name) for place, item in enumerate(value)
    ]


# Half of a character beyond 16 bits, as JSON may hold it where a text was cut.
_HALF = re.compile("[\ud800-\udfff]")


def _whole(text: str, column: str, index: int, name: str) -> str:
    """Return a text that a tokenizer can take.

    Raises:
        ColumnError: The text has half of a character.
    """
    found = None if text.isascii() else _HALF.search(text)
    if found is None:
        return text
    raise ColumnError(
        f"dataset {name}, row {index}: column {column!r} must be text that UTF-8 can "
        f"hold: got {found[0]!r} at character {found.start()}, half of a character "
        "that was cut; leave it out"
    )


_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def _message(
    item: Any, place: int, column: str, index: int, name: str
) -> dict[str, str]:
    if isinstance(item, dict):
        # ShareGPT calls them `from` and `value`.
        role = item.get("role", item.get("from"))
        content = item.get("content", item.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            content = _whole(content, column, index, name)
            return {"role": _SHAREGPT_ROLES.get(role, role), "content": content}
    raise ColumnError(
        f"dataset {name}, row {index}: message {place} of column {column!r} must have "
        f"a role and a content, both text: got {item!r:.80}"
    )
