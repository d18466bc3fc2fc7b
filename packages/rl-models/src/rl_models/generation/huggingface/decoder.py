"""The interface of the sampling loop to a model, however it is run."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Decoder", "DecodingState", "GrowingState"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class DecodingState(Protocol):
    """One batch in flight."""

    def prefill(
        self,
        tokens_T: torch.Tensor,
        lengths_P: IntArray,
        first_row: int,
        prompt_B: IntArray,
    ) -> torch.Tensor:
        """Run packed prompts; rows from `first_row` on begin with `prompt_B`.

        Returns:
            [P, V] logits after the last token of each prompt.
        """
        ...

    def step(self, tokens_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """Feed one token per row; [B, V] logits."""
        ...

    def keep(self, alive_B: BoolArray) -> IntArray | None:
        """Drop the other rows; where each came from, or None if all stayed."""
        ...


class GrowingState(DecodingState, Protocol):
    """A batch in flight that takes further rows."""

    def admit(self, lengths_N: IntArray) -> int:
        """Make room behind the rows in flight; return the place of the first new row.

        The prompts of the new rows are run next, by `prefill`.
        """
        ...


class Decoder(Protocol):
    """A model that decodes batches."""

    mixes_lengths: bool
    """Whether prompts of different lengths, and chunks of prompts, share a batch, and
    rows may join one: `begin` then gives a `GrowingState`."""

    def begin(
        self, lengths_B: IntArray, max_new_tokens: int, *, more_follow: bool = False
    ) -> DecodingState:
        """Start a batch.

        Args:
            lengths_B: Prompt lengths, falling; of rows that join later none is longer.
            max_new_tokens: Tokens sampled per row at most.
            more_follow: Whether rows will join.
        """
        ...

    def refresh(self) -> None:
        """Note that the model's weights have changed."""
        ...

    def release(self) -> None:
        """Free memory that is kept between batches."""
        ...
