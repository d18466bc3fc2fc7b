"""Outcomes of conversations.

With the turn that ends a conversation, an environment may store a `ConversationOutcome`
in the row's metadata under `outcome`. The rollout completes it: it knows which limit
ended a conversation, and that one failed. Whether the row can be trained on is decided
separately.

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
    """The task was failed or can no longer be solved, or the opponent won."""
    FINISHED = "finished"
    """The conversation came to its end; the environment does not say whether the task
    was solved."""
    OUT_OF_TURNS = "out_of_turns"
    """A limit on turns was reached: of the environment, the task or the rollout."""
    OUT_OF_TOKENS = "out_of_tokens"
    """A limit on tokens was reached: of an answer, the task or the conversation."""
    OUT_OF_TIME = "out_of_time"
    """A limit on time was reached: of the task, or of a program that was judged."""
    OUT_OF_MEMORY = "out_of_memory"
    """A program that was judged reached its limit on memory."""
    ILLEGAL = "illegal"
    """Too many responses broke the rules or could not be read."""
    REFUSED = "refused"
    """The policy declined the task; only an environment can tell."""
    ERROR = "error"
    """The environment or the infrastructure failed."""


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
