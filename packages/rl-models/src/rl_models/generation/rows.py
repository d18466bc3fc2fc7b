"""Checks of rows by every generation backend before it samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_distributed.errors import BatchError
from rl_models.errors import ContextLengthError

__all__ = ["check_rows", "stop_strings_of"]

IntArray = npt.NDArray[np.int64]


def check_rows(
    input_ids: torch.Tensor, lengths: IntArray, limit: int, context: int | None
) -> None:
    """Refuse rows that are no prompts, or that have no room for an answer.

    Args:
        input_ids: [B, S] right-padded.
        lengths: [B] tokens per row.
        limit: Maximum number of new tokens per row.
        context: Longest row of the model; None: any.

    Raises:
        BatchError: A length that does not fit its row.
        ContextLengthError: A prompt that is too long.
    """
    if len(lengths) != len(input_ids):
        raise BatchError(
            "input_lengths must have one entry per row of input_ids: got "
            f"{len(lengths)} entries for {len(input_ids)} rows."
        )
    wrong = np.flatnonzero((lengths < 1) | (lengths > input_ids.shape[1]))
    if len(wrong):
        row = int(wrong[0])
        raise BatchError(
            f"input_lengths[{row}] must lie between 1 and the {input_ids.shape[1]} "
            f"columns of input_ids: got {int(lengths[row])}."
        )
    if context is None:
        return
    long = np.flatnonzero(lengths + limit > context)
    if len(long):
        row = int(long[0])
        raise ContextLengthError(
            f"Row {row} has a prompt of {int(lengths[row])} tokens, but the context of "
            f"{context} tokens leaves room for {max(0, context - limit)} beside "
            f"max_new_tokens={limit} ({len(long)} of {len(lengths)} rows are too "
            "long). Shorten the prompt, lower max_new_tokens, or take a model with a "
            "longer context."
        )


def stop_strings_of(
    data: Mapping[str, Any], common: Sequence[str] | None
) -> list[list[str]]:
    """Return the stop strings of each row: the common ones, then the row's own.

    Raises:
        BatchError: A row has something else than a list of texts that are not empty.
    """
    own: Sequence[Any] = data.get("stop_strings") or [None] * len(data["input_lengths"])
    for row, strings in enumerate(own):
        # A text alone would be taken for a list of its letters, each of which ends.
        is_list = strings is None or isinstance(strings, list | tuple)
        if not is_list or not all(isinstance(s, str) and s for s in strings or ()):
            raise BatchError(
                f"stop_strings[{row}] must be a list of texts that are not empty, or "
                f"None: got {strings!r}."
            )
    return [[*(common or ()), *(row or ())] for row in own]
