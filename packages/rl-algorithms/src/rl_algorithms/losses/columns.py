"""Access to the columns of a training batch, checked and next-token aligned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.errors import LossInputError

__all__ = ["TokenColumns", "column", "next_token_column"]

_LOGITS = ("logits", "next_token_logits")


def column(data: Mapping[str, Any], name: str, *, needed_by: str) -> Tensor:
    """Return the tensor column `name`, or raise an error that says what needs it."""
    value = data.get(name)
    if not isinstance(value, Tensor):
        raise LossInputError(
            f"column {name!r} of the batch is {'missing' if value is None else 'no '}"
            f"{'' if value is None else 'tensor'}: {needed_by} needs it; the batch has "
            f"{', '.join(sorted(map(str, data)))}"
        )
    return value


def next_token_column(
    data: Mapping[str, Any], name: str, like: Tensor, *, needed_by: str
) -> Tensor:
    """Return column `name` [B, S] without its first position, shaped as `like`."""
    value = column(data, name, needed_by=needed_by)[:, 1:]
    if value.shape != like.shape:
        raise LossInputError(
            f"column {name!r} must be [B, S] = "
            f"{[like.shape[0], like.shape[1] + 1]}: got "
            f"{[value.shape[0], value.shape[1] + 1]}"
        )
    return value


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The columns of every token loss. All token tensors are [B, S-1]."""

    logprobs: Tensor
    """Log-probs under the policy being trained; they carry the gradient."""
    token_mask: Tensor
    """1 where the token is trained on, 0 elsewhere."""
    sample_mask: Tensor
    """[B], 1 where the row counts."""
    mask: Tensor
    """Product of both masks."""
    masked_out: Tensor
    """Boolean, true where `mask` is 0."""

    @classmethod
    def read(
        cls, data: Mapping[str, Any], inputs: Mapping[str, Tensor], *, needed_by: str
    ) -> TokenColumns:
        """Read the columns that every token loss needs."""
        logprobs = inputs.get("next_token_logprobs")
        _refuse_logits(inputs, needed_by)
        if logprobs is None:
            raise LossInputError(
                f"{needed_by} is computed from next_token_logprobs: got "
                f"{', '.join(sorted(inputs)) or 'nothing'}; call it with "
                "next_token_logprobs=[B, S-1]"
            )
        token_mask = next_token_column(
            data, "token_mask", logprobs, needed_by=needed_by
        ).to(logprobs.dtype)
        sample_mask = column(data, "sample_mask", needed_by=needed_by)
        sample_mask = sample_mask.to(logprobs.dtype)
        # A product and not a conjunction: masks may carry weights as well.
        mask = token_mask * sample_mask.unsqueeze(1)
        return cls(logprobs, token_mask, sample_mask, mask, mask == 0)

    def blank(self, values: Tensor) -> Tensor:
        """Set values to 0 where the mask is 0, even if they are NaN."""
        # Not a product with the mask: NaN * 0 is NaN, in the value and in the gradient.
        return torch.masked_fill(values, self.masked_out, 0.0)


def _refuse_logits(inputs: Mapping[str, Tensor], needed_by: str) -> None:
    """Raise an error that says how log-probs are made of logits, where these came.

    Raises:
        LossInputError: An input has the name or the dimensions of logits.
    """
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            continue
        if name in _LOGITS or (name == "next_token_logprobs" and value.dim() == 3):
            raise LossInputError(
                f"{needed_by} takes next_token_logprobs [B, S-1], the log-prob of each "
                f"next token, and no logits: got {name} {list(value.shape)}; pass "
                "torch.log_softmax(logits[:, :-1].float(), dim=-1)"
                ".gather(-1, input_ids[:, 1:, None]).squeeze(-1)"
            )
