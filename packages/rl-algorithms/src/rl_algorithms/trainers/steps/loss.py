"""`StaticLoss`: a loss from a plain function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rl_models.types import (
    LossInputType,
    LossType,
    TrainingRows,
)

__all__ = ["StaticLoss"]


class StaticLoss:
    """A token-level `LossFunction` computed from the log-probs of the tokens.

    Args:
        function: Takes the micro-batch, the two global counts, and
            `next_token_logprobs` [B, S-1]; returns the micro-batch's share of the loss
            and metrics.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __init__(
        self, function: Callable[..., tuple[Tensor, Mapping[str, Any]]]
    ) -> None:
        self._function = function

    def __call__(
        self,
        data: TrainingRows,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Call the function."""
        return self._function(data, global_valid_seqs, global_valid_toks, **inputs)
