"""`RewardRows`: a batch of responses in each form that reward functions accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RewardRows", "short"]


@dataclass(frozen=True, slots=True)
class RewardRows:
    """The rows of a batch in each form that a reward function may ask for."""

    prompts: Sequence[str]
    responses: Sequence[str]
    columns: Sequence[Mapping[str, Any]]
    """Columns of the data set, per row."""
    messages: Sequence[Sequence[Mapping[str, Any]]] = ()
    """Conversation per row; empty if no function asks for it."""

    @property
    def has_message_prompts(self) -> bool:
        """True if the data set's prompts are messages."""
        return bool(self.columns) and isinstance(self.columns[0].get("prompt"), list)

    def _split(self) -> list[int]:
        """Return the number of messages in each row before the policy's first."""
        return [
            # Without it the conversation has one response, its last message.
            int(columns.get("num_prompt_messages", len(log) - 1))
            for log, columns in zip(self.messages, self.columns, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.responses)

    def by_role(self) -> dict[str, Sequence[Any]]:
        """Return the columns by the role of the parameter that takes them."""
        return {
            "prompt": self.prompts,
            "response": self.responses,
            "messages": self.messages,
            "metadata": self.columns,
            **(self._message_roles() if len(self.messages) else {}),
        }

    def _message_roles(self) -> dict[str, Sequence[Any]]:
        parts = [*zip(self.messages, self._split(), strict=True)]
        return {
            "prompt_messages": [log[:split] for log, split in parts],
            "response_messages": [log[split:] for log, split in parts],
        }

    def describe(self, row: int) -> str:
        """Describe one row for a message."""
        return (
            f"row {row} (prompt {short(self.prompts[row])}, "
            f"response {short(self.responses[row])})"
        )


def short(text: str, limit: int = 60) -> str:
    """Abbreviate a text for a message."""
    return repr(text if len(text) <= limit else f"{text[: limit - 3]}...")
