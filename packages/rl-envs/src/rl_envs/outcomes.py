"""Outcomes of conversations, as reported by the environment.

With the turn that ends a conversation, the environment stores a `ConversationOutcome`
in the row's metadata under `outcome`. Whether the row can be trained on is decided
separately, by the rollout.

A second, stricter check stores its verdict beside it, under `second_check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

__all__ = [
    "OUTCOME_KEY",
    "SECOND_CHECK_KEY",
    "ConversationOutcome",
    "outcome_metrics",
    "outcome_of",
    "second_check_of",
]

OUTCOME_KEY = "outcome"
"""Metadata key of the `ConversationOutcome` of a finished conversation."""
SECOND_CHECK_KEY = "second_check"
"""Metadata key of the verdict of a second check: `accepted` or `rejected`."""
_VERDICTS = {"accepted": True, "rejected": False}
_UNFINISHED = "unfinished"


class ConversationOutcome(StrEnum):
    """Outcome of a conversation."""

    SOLVED = "solved"
    """The task was solved, or the game won."""
    LOST = "lost"
    """The task can no longer be solved, or the opponent won."""
    OUT_OF_TURNS = "out_of_turns"
    """The environment's own limit on turns was reached."""
    ILLEGAL = "illegal"
    """Too many responses broke the rules or could not be read."""


def outcome_of(metadata: Any) -> ConversationOutcome | None:
    """Return the outcome of a conversation; None if it has none (yet).

    Args:
        metadata: The metadata that an environment returned for the row.
    """
    value = metadata.get(OUTCOME_KEY) if isinstance(metadata, Mapping) else None
    if isinstance(value, str) and value in set(ConversationOutcome):
        return ConversationOutcome(value)
    return None


def second_check_of(metadata: Any) -> bool | None:
    """Return whether a second check accepted the answer; None if it was not checked.

    Args:
        metadata: The metadata that an environment returned for the row.
    """
    value = metadata.get(SECOND_CHECK_KEY) if isinstance(metadata, Mapping) else None
    return _VERDICTS.get(value) if isinstance(value, str) else None


def outcome_metrics(metadata: Iterable[Any]) -> dict[str, float]:
    """Return the share of conversations with each outcome, as `outcome/<name>`.

    Conversations without one, such as those cut off by a limit of the rollout, count as
    `outcome/unfinished`. The shares add up to 1; without conversations there are none.

    Args:
        metadata: The metadata returned by the last turn of each conversation.
    """
    found = [outcome_of(row) for row in metadata]
    names: list[tuple[str, ConversationOutcome | None]] = [
        *((outcome.value, outcome) for outcome in ConversationOutcome),
        (_UNFINISHED, None),
    ]
    if not found:
        return {}
    return {
        f"outcome/{name}": found.count(outcome) / len(found) for name, outcome in names
    }
