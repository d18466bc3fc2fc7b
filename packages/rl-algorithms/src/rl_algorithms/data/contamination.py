"""Find held-out rows that also occur in the training data.

```
held-out rows --texts--> keys and n-grams --found among training rows?--> overlaps
```
Texts are compared in a canonical form: Unicode-normalised, lower case, single spaces.
Signs are kept, because 3+4 and 3-4 are different tasks. N-grams are runs of words and
signs; they find a held-out task inside a longer training text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rl_algorithms.data.columns import MESSAGES_NAMES, PROMPT_NAMES
from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.prompt_rows import PromptFormat
from rl_algorithms.data.types import Row, Rows
from rl_algorithms.errors import EmptyDatasetError

__all__ = [
    "NamedRows",
    "Overlap",
    "describe_overlaps",
    "find_overlaps",
    "rows_without",
]

_SHOWN_CHARACTERS = 80

_PIECE = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class NamedRows:
    """Rows and their name in messages."""

    name: str
    rows: Rows


@dataclass(frozen=True, slots=True)
class Overlap:
    """A training row and the held-out row that it leaks."""

    train_name: str
    train_row: int
    held_out_name: str
    held_out_row: int
    is_exact: bool
    """Whether the prompts are equal; otherwise they share an n-gram."""
    text: str
    """The held-out prompt."""


def find_overlaps(
    train: Sequence[NamedRows],
    held_out: Sequence[NamedRows],
    config: DataConfig | None = None,
    *,
    ngram: int | None = None,
) -> list[Overlap]:
    """Find training rows with a held-out prompt.

    Args:
        train: Training rows.
        held_out: Held-out rows.
        config: Names of the columns, and the template; default: the usual names.
        ngram: Also compare runs of this many words and signs of the held-out prompt
            with those of all texts of a training row. Shorter prompts are compared as
            a whole. None: compare whole prompts only.

    Returns:
        At most one overlap per training row, in the order of the rows.

    Raises:
        ValueError: `ngram` is not positive.
        DataError: The template cannot be filled.
    """
    if ngram is not None and ngram < 1:
        raise ValueError(f"ngram must be at least 1: got {ngram}")
    reader = _PromptReader(config or DataConfig())
    places: dict[str, tuple[str, int]] = {}
    runs: dict[tuple[str, ...], str] = {}
    for part in held_out:
        for index, row in enumerate(part.rows):
            key = _canonical(reader.read(part.name, index, row))
            # Of equal held-out prompts only the first is indexed.
            if key and places.setdefault(key, (part.name, index)) == (part.name, index):
                runs.update(dict.fromkeys(_runs(key, ngram), key))
    found = []
    for part in train:
        for index, row in enumerate(part.rows):
            key = _canonical(reader.read(part.name, index, row))
            is_exact = key in places
            # The whole row and not only its prompt: an answer may quote a held-out
            # task.
            if not is_exact and runs:
                key = _shared(row, runs, ngram)
            if key in places:
                held = places[key]
                found.append(Overlap(part.name, index, *held, is_exact, key))
    return found


def describe_overlaps(overlaps: Sequence[Overlap]) -> str:
    """Return a sentence that counts the leaking training rows and names the first."""
    first = overlaps[0]
    num_held = len({(o.held_out_name, o.held_out_row) for o in overlaps})
    how = "is" if first.is_exact else "shares an n-gram with"
    text = first.text
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}..."
    return (
        f"{len(overlaps)} training rows leak {num_held} held-out rows: row "
        f"{first.train_row} of dataset {first.train_name} {how} row "
        f"{first.held_out_row} of {first.held_out_name}, {text!r}"
    )


def rows_without(part: NamedRows, overlaps: Sequence[Overlap]) -> Rows:
    """Return the rows of a part that leak no held-out row.

    Raises:
        EmptyDatasetError: No row is left.
    """
    out = {o.train_row for o in overlaps if o.train_name == part.name}
    left = [row for index, row in enumerate(part.rows) if index not in out]
    if not left:
        raise EmptyDatasetError(
            f"data.contamination.action=drop leaves no row of dataset {part.name}: all "
            f"{len(out)} are held-out rows, too; give it other rows, or hold others out"
        )
    return left


def _shared(row: Row, runs: Mapping[tuple[str, ...], str], ngram: int | None) -> str:
    """Return the held-out prompt that shares an n-gram with a row, or None."""
    text = _canonical("\n".join(_texts_in(row)))
    return next((runs[run] for run in _runs(text, ngram) if run in runs), "")


def _runs(text: str, size: int | None) -> Iterator[tuple[str, ...]]:
    if size is None:
        return iter(())
    pieces = _PIECE.findall(text)
    return zip(*(islice(pieces, start, None) for start in range(size)), strict=False)


def _canonical(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class _PromptReader:
    """Extracts the prompt of a row as canonical text.

    Args:
        config: Names of the columns, and the template.
    """

    def __init__(self, config: DataConfig) -> None:
        self._format = PromptFormat(config)
        self._prompts: tuple[str, ...] = PROMPT_NAMES
        if config.input_key:
            self._prompts = (config.input_key,)
        if config.messages_key and not config.input_key:
            self._prompts = ()
        self._talks: tuple[str, ...] = (
            (config.messages_key,) if config.messages_key else MESSAGES_NAMES
        )

    def read(self, name: str, index: int, row: Row) -> str:
        """Return the prompt, or all texts of a row without a prompt."""
        prompt = next(
            (row[column] for column in self._prompts if row.get(column)), None
        )
        if isinstance(prompt, str):
            # The template may fill in further columns, which tell two rows apart.
            return self._format.user_text(prompt, row, index, name)
        if prompt is None:
            prompt = next(
                (row[column] for column in self._talks if row.get(column)), row
            )
        if isinstance(prompt, Sequence):
            prompt = _without_answers(prompt)
        return "\n".join(_texts_in(prompt))


def _without_answers(messages: Sequence[Any]) -> list[Any]:
    """Return the messages before the final answers of a conversation."""
    # A system prompt is shared by all rows and would make every pair overlap.
    found = [message for message in messages if _role_of(message) != "system"]
    while found and _role_of(found[-1]) in ("assistant", "gpt"):
        found.pop()
    return found


def _role_of(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return None
    return message.get("role", message.get("from"))


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a cell or a row except the names of roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        # Operands may be in columns of their own, and tell tasks apart.
        yield str(value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name not in ("role", "from"):
                yield from _texts_in(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts_in(part)
