"""`PromptOrder`: the prompts of all epochs as one numbered sequence."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Prompt", "PromptOrder"]


class Prompt(NamedTuple):
    """A position in the order of the data."""

    number: int
    """Position in the whole run; identifies the prompt."""
    epoch: int
    row: int
    """Position in the order of the epoch, as a loader returns it."""


class PromptOrder:
    """Hands out prompts one by one, without a break between epochs.

    Args:
        prompts_per_epoch: Number of prompts in a pass over the data.
        max_num_epochs: Number of passes; None for no limit.
    """

    def __init__(self, prompts_per_epoch: int, max_num_epochs: int | None) -> None:
        self._per_epoch = prompts_per_epoch
        self._end = (
            None if max_num_epochs is None else max_num_epochs * prompts_per_epoch
        )
        self.position = 0
        """Number of the next prompt."""

    @property
    def is_used_up(self) -> bool:
        """Whether no prompt is left."""
        return self._end is not None and self.position >= self._end

    def prompt(self, number: int) -> Prompt:
        """Return the prompt with this number."""
        return Prompt(number, *divmod(number, self._per_epoch))

    def draw(self) -> Prompt:
        """Return the next prompt and advance."""
        prompt = self.prompt(self.position)
        self.position += 1
        return prompt
