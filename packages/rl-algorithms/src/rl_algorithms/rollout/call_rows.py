"""`CallRows`: the rows of a call of the generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rl_algorithms.rollout.open_conversation import FirstTurns, OpenConversation
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.types import (
    GenerationDatumSpec,
    GenerationInput,
    GenerationOutputSpec,
    SamplingParams,
)

__all__ = ["CallRows", "SampledRow"]


class SampledRow(Protocol):
    """A row that waits for the generator; called in the threads of the desk."""

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        ...

    @property
    def sampling(self) -> tuple[bool, SamplingParams | None]:
        """Whether the most likely token is taken, and how to sample otherwise.

        Rows of one call share them; None: as the generator is set.
        """
        ...

    @property
    def opening(self) -> OpenConversation | None:
        """A new conversation, to be asked for together with others; else None."""
        ...

    def note_version(self, version: int) -> None:
        """Be told of weights that have sampled it, before it gets its answer.

        Called for those of its oldest and of its newest token.
        """
        ...

    def question(self) -> BatchedDataDict[GenerationDatumSpec]:
        """Return the row that `generate` takes."""
        ...

    def answer(self, output: BatchedDataDict[GenerationOutputSpec]) -> None:
        """Take the row that `generate` gave back."""
        ...

    def fail(self, error: Exception) -> None:
        """Be told why it could not be sampled."""
        ...


class CallRows:
    """Rows that are asked for and answered by one call.

    Args:
        rows: The rows.
    """

    def __init__(self, rows: Sequence[SampledRow]) -> None:
        first: list[SampledRow] = []
        opening: list[OpenConversation] = []
        others: list[SampledRow] = []
        for row in rows:
            conversation = row.opening
            # Beside the last one, which mostly has the same prompt.
            if conversation is not None and (
                not opening or conversation.fits_beside(opening[-1])
            ):
                first.append(row)
                opening.append(conversation)
            else:
                others.append(row)
        if len(first) == 1:
            # A batch of one would cost more than the row by itself.
            opening, first, others = [], [], [*first, *others]
        self.rows: Sequence[SampledRow] = [*first, *others]
        """The rows, in the order of the call."""
        self._num_first, self._others = len(first), others
        self._first = FirstTurns(opening) if opening else None

    def questions(self, pad_token_id: int) -> GenerationInput:
        """Return the batch that `generate` takes.

        Args:
            pad_token_id: Token that pads rows to one length.
        """
        parts: list[GenerationInput] = [row.question() for row in self._others]
        if self._first is not None:
            parts.insert(0, self._first.questions())
        if any("stop_strings" in part for part in parts):
            for part in parts:
                # A column must be in all rows or in none.
                part.setdefault("stop_strings", [None] * part.size)
        return BatchedDataDict.from_batches(parts, {"input_ids": pad_token_id})

    def answer(self, output: BatchedDataDict[GenerationOutputSpec]) -> None:
        """Pass each row what `generate` returned for it."""
        if self._first is not None:
            self._first.answer(output.slice(0, self._num_first))
        for place, row in enumerate(self._others, self._num_first):
            row.answer(output.slice(place, place + 1))
