"""What the sampling loop asks of a model, whichever way the model is run."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Decoder", "DecodingState"]

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


class Decoder(Protocol):
    """A model that decodes batches."""

    mixes_lengths: bool
    """Whether prompts of different lengths, and chunks of prompts, share a batch."""

    def begin(self, lengths_B: IntArray, max_new_tokens: int) -> DecodingState:
        """Start a batch; rows are sorted by falling prompt length."""
        ...

    def refresh(self) -> None:
        """Note that the model's weights have changed."""
        ...

    def release(self) -> None:
        """Free memory that is kept between batches."""
        ...
