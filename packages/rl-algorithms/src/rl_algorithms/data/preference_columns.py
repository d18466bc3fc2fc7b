"""Find the columns of preference pairs, and the end of their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_algorithms.data.columns import find_column, messages_of, text_of
from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.types import Row, Rows
from rl_algorithms.errors import ColumnError

if TYPE_CHECKING:
    from rl_algorithms.data.prompt_rows import PromptFormat

__all__ = ["Messages", "Pair", "find_pair_columns", "find_pairs"]

_PROMPT = ("prompt", "question", "problem", "input", "instruction", "query", "context")
_CHOSEN = ("chosen", "chosen_response", "preferred", "response_chosen")
_REJECTED = ("rejected", "rejected_response", "dispreferred", "response_rejected")
_COMPLETIONS = ("completions",)

Messages = list[dict[str, str]]
"""A conversation: messages with `role` and `content`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One preference as conversations."""

    prompt: Messages
    """Messages that both conversations begin with."""
    chosen: Messages
    """The prompt and the better answer."""
    rejected: Messages
    """The prompt and the worse answer."""


@dataclass(frozen=True, slots=True)
class _Columns:
    prompt: str | None
    chosen: str | None
    rejected: str | None
    completions: str | None


def find_pairs(
    rows: Rows, config: DataConfig, layout: PromptFormat, name: str
) -> list[Pair]:
    """Read the pairs of a dataset.

    Raises:
        ColumnError: A column is missing or holds another type.
    """
    columns = find_pair_columns(rows, config, name)
    return [_pair(row, columns, layout, index, name) for index, row in enumerate(rows)]


def find_pair_columns(rows: Rows, config: DataConfig, name: str) -> _Columns:
    """Find the columns by their configured or usual names.

    Raises:
        ColumnError: A configured column is missing, or no pair can be read.
    """
    present = list(rows[0])
    found = _Columns(
        find_column("input_key", config.input_key, _PROMPT, present, name),
        find_column("chosen_key", config.chosen_key, _CHOSEN, present, name),
        find_column("rejected_key", config.rejected_key, _REJECTED, present, name),
        find_column("completions_key", None, _COMPLETIONS, present, name),
    )
    if found.chosen is not None and found.rejected is not None:
        if found.chosen == found.rejected:
            raise ColumnError(
                f"data.chosen_key and data.rejected_key both name {found.chosen!r}: "
                "name the columns of the better and of the worse answer"
            )
        return found
    if found.completions is None:
        raise ColumnError(
            f"dataset {name} has no pairs: looked for {' or '.join(_CHOSEN)} with "
            f"{' or '.join(_REJECTED)}, or for 'completions', and it has "
            f"{', '.join(map(repr, present))}; set data.chosen_key and "
            "data.rejected_key"
        )
    if found.prompt is None:
        raise ColumnError(
            f"dataset {name} has completions but no prompt: looked for "
            f"{', '.join(_PROMPT)}, and it has {', '.join(map(repr, present))}; set "
            "data.input_key"
        )
    return found


def _pair(
    row: Row, columns: _Columns, layout: PromptFormat, index: int, name: str
) -> Pair:
    if columns.chosen is None or columns.rejected is None:
        assert columns.completions is not None
        row = _best_and_worst(row, columns.completions, index, name)
        columns = _Columns(columns.prompt, _BEST, _WORST, None)
    chosen, rejected = str(columns.chosen), str(columns.rejected)
    sides = [_answer(row, column, index, name) for column in (chosen, rejected)]
    if columns.prompt is not None:
        repeated, prompt = _prompt(row, columns.prompt, layout, index, name)
        sides = [_without(repeated, side) for side in sides]
    else:
        prompt = _shared(sides)
        sides = [side[len(prompt) :] for side in sides]
    if prompt:
        # Only here: without a prompt, both texts are taken as they are.
        prompt = layout.with_system(prompt)
    for column, side in zip((chosen, rejected), sides, strict=True):
        if not any(m["role"] == "assistant" and m["content"] for m in side):
            raise ColumnError(
                f"dataset {name}, row {index}: column {column!r} must hold an answer "
                "(a text, or messages of the assistant) that is not empty and not "
                f"part of the prompt: got {row.get(column)!r:.80}"
            )
    return Pair(prompt, prompt + sides[0], prompt + sides[1])


def _prompt(
    row: Row, column: str, layout: PromptFormat, index: int, name: str
) -> tuple[Messages, Messages]:
    """Return the prompt as answers repeat it, and as the policy gets it."""
    if isinstance(row.get(column), list):
        messages = messages_of(row, column, index, name)
        return messages, messages
    text = text_of(row, column, index, name)
    # Rows know nothing of the template.
    filled = layout.user_text(text, row, index, name)
    return [{"role": "user", "content": text}], [{"role": "user", "content": filled}]


def _answer(row: Row, column: str, index: int, name: str) -> Messages:
    if isinstance(row.get(column), list):
        return messages_of(row, column, index, name)
    return [{"role": "assistant", "content": text_of(row, column, index, name)}]


def _without(prompt: Messages, side: Messages) -> Messages:
    """Return the answer, without the prompt if it begins with it."""
    return side[len(prompt) :] if side[: len(prompt)] == prompt else side


def _shared(sides: Sequence[Messages]) -> Messages:
    """Return the messages that both conversations begin with."""
    first, second = sides
    same = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        same += 1
    # Equal conversations share all messages, so the last one is taken as the answer.
    return first[: min(same, len(first) - 1, len(second) - 1)]


_BEST, _WORST = "best completion", "worst completion"


def _best_and_worst(row: Row, column: str, index: int, name: str) -> dict[str, Any]:
    """Pick two completions by rank, 0 being the best."""
    value = row.get(column)
    ranked: list[tuple[float, Any]] = []
    for item in value if isinstance(value, list) else []:
        if not (
            isinstance(item, Mapping)
            and isinstance(item.get("rank"), int | float)
            and "completion" in item
        ):
            # One odd item spoils the comparison, and the error below shows the whole
            # cell.
            ranked = []
            break
        ranked.append((item["rank"], item["completion"]))
    # By rank alone, as completions may be mappings, which have no order.
    ranked.sort(key=lambda pair: pair[0])
    if len(ranked) < 2 or ranked[0][0] == ranked[-1][0]:
        raise ColumnError(
            f"dataset {name}, row {index}: column {column!r} must be a list of at "
            "least two mappings with 'rank' (0 is best) and 'completion', of different "
            f"ranks: got {value!r:.80}"
        )
    return {**row, _BEST: ranked[0][1], _WORST: ranked[-1][1]}
