"""Read prompts from rows: columns -> templates -> messages.

Imports no torch, so that commands without a model can read rows as training does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_algorithms.data.columns import (
    ColumnMap,
    find_columns,
    messages_of,
    text_of,
)
from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.progress import track
from rl_algorithms.data.text_files import text_or_file
from rl_algorithms.data.types import Row, Rows
from rl_algorithms.errors import ColumnError, DataError

__all__ = ["PromptFormat", "PromptRow", "plain_text", "read_prompts"]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row, as a policy and its environment get it."""

    messages: list[dict[str, str]]
    """The prompt."""
    columns: dict[str, Any]
    """All columns, for the environment."""


class PromptFormat:
    """The templates around a prompt.

    Args:
        config: Template and system prompt, as text or as files.
    """

    def __init__(self, config: DataConfig) -> None:
        self._template = text_or_file(
            config.prompt_template, config.prompt_file, "prompt_file"
        )
        self.system_prompt = text_or_file(
            config.system_prompt, config.system_prompt_file, "system_prompt_file"
        )

    def user_text(self, prompt: str, row: Row, index: int, name: str) -> str:
        """Fill the template.

        Raises:
            ColumnError: The template names a column that the row does not have.
        """
        if self._template is None:
            return prompt
        try:
            return self._template.format_map({**row, "prompt": prompt})
        except KeyError as error:
            raise ColumnError(
                f"data.prompt_template names {{{error.args[0]}}}, which is no column "
                f"of dataset {name}, row {index}: it has {', '.join(map(repr, row))} "
                "(and {prompt}); write literal braces twice"
            ) from error
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            # Raised for unbalanced braces, for {} and {0}, for {column.attribute}, and
            # for {column[key]} and {column:>9} of a cell that has no such form.
            raise DataError(
                f"data.prompt_template cannot be filled: {error}; it may hold "
                "{prompt} and {column} fields, and literal braces must be written twice"
            ) from error

    def with_system(self, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """Put the system prompt first, unless there is one."""
        if self.system_prompt is None or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]


def read_prompts(rows: Rows, config: DataConfig, name: str) -> list[PromptRow]:
    """Read the prompts of rows, and the columns that their environment gets.

    A prompt is text or messages. A conversation that ends with an answer is cut before
    it. The environment gets all columns, with the answer under the name `answer`
    whatever its column is called.

    Args:
        rows: Loaded rows.
        config: Columns and templates.
        name: Name of the dataset in messages.

    Raises:
        ColumnError: A column is missing or holds another type.
    """
    columns = find_columns(rows, config, name)
    layout = PromptFormat(config)
    found = []
    for index, row in enumerate(track(rows, "reading prompts", total=len(rows))):
        messages, answer = _prompt_of(row, columns, layout, index, name)
        # A copy, as the caller's row must not gain a column.
        info = dict(row)
        if answer is not None:
            # A column that is named `answer` wins.
            info.setdefault("answer", answer)
        found.append(PromptRow(messages, info))
    return found


def plain_text(messages: Sequence[dict[str, str]]) -> str:
    """Return messages as plain text: their contents joined by newlines."""
    return "\n".join(message["content"] for message in messages)


def _prompt_of(
    row: Row, columns: ColumnMap, layout: PromptFormat, index: int, name: str
) -> tuple[list[dict[str, str]], Any]:
    """Return the messages of a prompt, and the answer if the row has one."""
    answer = row.get(columns.answer) if columns.answer is not None else None
    if columns.prompt is not None and isinstance(row.get(columns.prompt), list):
        messages = messages_of(row, columns.prompt, index, name)
    elif columns.prompt is not None:
        text = text_of(row, columns.prompt, index, name)
        messages = [
            {"role": "user", "content": layout.user_text(text, row, index, name)}
        ]
    elif columns.messages is not None:
        messages = messages_of(row, columns.messages, index, name)
        if messages[-1]["role"] == "assistant":
            answer = messages[-1]["content"] if answer is None else answer
            # The policy is to write the answer itself.
            messages = messages[:-1]
        if not messages:
            raise ColumnError(
                f"dataset {name}, row {index}: column {columns.messages!r} has no "
                "message before the answer"
            )
    else:
        text = text_of(row, columns.text or "text", index, name)
        messages = [
            {"role": "user", "content": layout.user_text(text, row, index, name)}
        ]
    return layout.with_system(messages), answer
