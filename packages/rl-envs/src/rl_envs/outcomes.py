"""Why a conversation ended, as the environment sees it.

The environment puts a `ConversationOutcome` into the row's metadata under `outcome`
with the turn that ends the conversation. Whether a row can be trained on is another
question, which the rollout answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

__all__ = ["OUTCOME_KEY", "ConversationOutcome", "outcome_metrics", "outcome_of"]

OUTCOME_KEY = "outcome"
"""Key of the metadata that holds a `ConversationOutcome` once a conversation ended."""
_UNFINISHED = "unfinished"


class ConversationOutcome(StrEnum):
    """How a conversation ended."""

    SOLVED = "solved"
    """The task is solved, or the game won."""
    LOST = "lost"
    """The task can no longer be solved, or the opponent has won."""
    OUT_OF_TURNS = "out_of_turns"
    """The environment's own limit of turns came first."""
    ILLEGAL = "illegal"
    """As many responses as are allowed broke the rules or could not be read."""


def outcome_of(metadata: Any) -> ConversationOutcome | None:
    """Return how a conversation ended; None if it goes on, or nothing says so.

    Args:
        metadata: What an environment returned for the row.
    """
    value = metadata.get(OUTCOME_KEY) if isinstance(metadata, Mapping) else None
    if isinstance(value, str) and value in set(ConversationOutcome):
        return ConversationOutcome(value)
    return None


def outcome_metrics(metadata: Iterable[Any]) -> dict[str, float]:
    """Return the share of conversations with each outcome, as `outcome/<name>`.

    Those without one, because a limit of the rollout came first, are
    `outcome/unfinished`. The shares add up to 1; no conversations have no metrics.

    Args:
        metadata: What the last turn of each conversation returned.
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
