"""The columns that losses read from a micro-batch: their types, and their checks.

A loss declares its columns in a `TypedDict`, which a type checker and the check at run
time both read. The text is for errors: shape and content of the column, and how it gets
into the batch.

    class MyColumns(TokenMasks):
        bonus: Annotated[Tensor, "[B]; compute it from the rewards"]

    _COLUMNS = LossColumns(MyColumns, "MyLossFn")
    rows = _COLUMNS.read(data)  # rows["bonus"] is a tensor
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Generic,
    NotRequired,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from rl_algorithms.errors import LossInputError
from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = [
    "LossColumns",
    "LossRows",
    "TokenColumns",
    "TokenMasks",
    "next_tokens",
]

_LOGITS = ("logits", "next_token_logits")
SpecT = TypeVar("SpecT")
LossRows: TypeAlias = BatchedDataDict[SpecT] | SpecT
"""A micro-batch with the columns of a `TypedDict`, and any others."""


class TokenMasks(TypedDict):
    """Columns of every loss that trains on tokens."""

    token_mask: Annotated[
        Tensor, "[B, S]; set it to 1 at tokens to train on, 0 elsewhere"
    ]
    sample_mask: Annotated[
        Tensor, "[B]; set it to 1 for rows that count, as torch.ones(B)"
    ]


class LossColumns(Generic[SpecT]):
    """Reads the columns of a loss from micro-batches.

    Args:
        spec: `TypedDict` whose fields are `Annotated[Tensor, text]`.
        loss: Name of the loss, for messages.
    """

    def __init__(self, spec: type[SpecT], loss: str) -> None:
        self.loss = loss
        self._texts: dict[str, str] = {}
        self._required: list[str] = []
        for name, hint in get_type_hints(spec, include_extras=True).items():
            if get_origin(hint) is NotRequired:
                (hint,) = get_args(hint)
            else:
                self._required.append(name)
            (self._texts[name],) = hint.__metadata__

    def read(self, data: LossRows[SpecT]) -> SpecT:
        """Return the micro-batch itself, whose required columns are now known.

        Raises:
            LossInputError: A required column is missing, or is no tensor.
        """
        rows = cast("Mapping[str, Any]", data)
        for name in self._required:
            self.need(rows.get(name), name, data)
        return cast("SpecT", rows)

    def need(
        self, value: Tensor | None, name: str, data: LossRows[SpecT], why: str = ""
    ) -> Tensor:
        """Return the value of a column that is needed, always or by a setting.

        Args:
            value: The value, None if there is none.
            name: Name of the column, for the message.
            data: The micro-batch, for the message.
            why: The setting, for the message.

        Raises:
            LossInputError: The column is missing, or is no tensor.
        """
        if isinstance(value, Tensor):
            return value
        names = cast("Mapping[str, Any]", data)
        raise LossInputError(
            f"column {name!r} of the batch is "
            f"{'missing' if value is None else 'no tensor'}: {self.loss}{why} needs "
            f"it as {self._texts[name]}; the batch has "
            f"{', '.join(sorted(map(str, names)))}"
        )


def next_tokens(value: Tensor, name: str, like: Tensor) -> Tensor:
    """Return a column [B, S] without its first position, shaped as `like`."""
    value = value[:, 1:]
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
        cls, rows: TokenMasks, inputs: Mapping[str, Tensor], *, needed_by: str
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
        token_mask = next_tokens(rows["token_mask"], "token_mask", logprobs)
        token_mask = token_mask.to(logprobs.dtype)
        sample_mask = rows["sample_mask"].to(logprobs.dtype)
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
