"""Right and wrong responses to rows, for testing an environment's rewards."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_envs.errors import TaskError
from rl_envs.interfaces import MessageLog
from rl_envs.testing.findings import Examination

__all__ = ["Trial", "gold_of", "prompt_messages", "trials"]

_GOLD_COLUMNS = ("answer", "ground_truth")
_PROMPT_COLUMNS = ("prompt", "messages")
_GARBAGE_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Trial:
    """A response to try on a row."""

    kind: str
    """`gold`, `empty`, `garbage`, `prompt` or `change`."""
    row: int
    response: str


def prompt_messages(columns: Mapping[str, Any], row: int) -> list[dict[str, Any]]:
    """Return the initial conversation of a row.

    Args:
        columns: The row; `prompt` or `messages` is a text or messages.
        row: Its index, for error messages.

    Raises:
        TaskError: It has no prompt.
    """
    for name in _PROMPT_COLUMNS:
        prompt = columns.get(name)
        if isinstance(prompt, str) and prompt:
            return [{"role": "user", "content": prompt}]
        if isinstance(prompt, Sequence) and prompt and not isinstance(prompt, str):
            messages = [dict(message) for message in prompt]
            # A complete conversation ends with the answer, which is no prompt.
            ends = len(messages) > 1 and messages[-1].get("role") == "assistant"
            return messages[:-1] if ends else messages
    raise TaskError(
        f"row {row} must have a column 'prompt' or 'messages', text or messages: it "
        f"has {', '.join(map(str, columns)) or 'no columns'}"
    )


def gold_of(columns: Mapping[str, Any], column: str | None = None) -> str | None:
    """Return a right response to a row; None: the row has none.

    Args:
        columns: The row.
        column: Column of the response; None: the first of the usual ones.
    """
    names = _GOLD_COLUMNS if column is None else (column,)
    for name in names:
        gold = columns.get(name)
        if isinstance(gold, int | float) and not isinstance(gold, bool):
            return str(gold)
        if isinstance(gold, str) and gold.strip():
            return gold
    return None


def trials(
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[MessageLog],
    config: Examination,
) -> list[Trial]:
    """Return the responses to try, deterministically.

    Wrong responses that happen to equal the right one are left out.

    Args:
        rows: Columns of the tasks.
        prompts: Initial conversation of each row.
        config: Seed, gold column and number of changes.
    """
    found: list[Trial] = []
    for row, columns in enumerate(rows):
        # Random hashes text seeds with SHA-512, so they do not depend on the process.
        rng = random.Random(f"examination/{config.seed}/{row}")
        gold = gold_of(columns, config.gold_column)
        if gold is not None:
            found.append(Trial("gold", row, gold))
            changes = {_changed(gold, rng) for _ in range(config.changes_per_row)}
            found += [Trial("change", row, text) for text in sorted(changes)]
        asked = prompts[row][-1].get("content")
        wrong = {"empty": "", "garbage": _garbage(rng), "prompt": str(asked)}
        found += [
            Trial(kind, row, text)
            for kind, text in wrong.items()
            if gold is None or text.strip() != gold.strip()
        ]
    return found


def _changed(text: str, rng: random.Random) -> str:
    """Replace one visible character with another of the same kind."""
    places = [place for place, letter in enumerate(text) if not letter.isspace()]
    place = rng.choice(places)
    old = text[place]
    kinds = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
    kind = next((kind for kind in kinds if old in kind), "#~")
    new = rng.choice([letter for letter in kind if letter != old])
    return text[:place] + new + text[place + 1 :]


def _garbage(rng: random.Random) -> str:
    letters = string.ascii_letters + string.punctuation + " \n"
    return "".join(rng.choices(letters, k=_GARBAGE_CHARACTERS))
