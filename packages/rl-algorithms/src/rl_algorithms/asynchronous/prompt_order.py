"""`PromptOrder`: the prompts of all epochs as one numbered sequence."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Prompt", "PromptOrder"]


class Prompt(NamedTuple):
    """A place in the order of the data."""

    number: int
    """Its place in the whole run; it names the prompt."""
    epoch: int
    row: int
    """Its place in the order of its epoch, as a loader hands it out."""


class PromptOrder:
    """Hands out prompts one by one; sampling runs across the ends of epochs.

    Args:
        prompts_per_epoch: Prompts of a pass over the data.
        max_num_epochs: Passes; None: without end.
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
        """Whether there is no further prompt."""
        return self._end is not None and self.position >= self._end

    def prompt(self, number: int) -> Prompt:
        """Return the prompt of this number."""
        return Prompt(number, *divmod(number, self._per_epoch))

    def draw(self) -> Prompt:
        """Return the next prompt and move on."""
        prompt = self.prompt(self.position)
        self.position += 1
        return prompt
