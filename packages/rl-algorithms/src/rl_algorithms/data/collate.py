"""Collate processed rows into columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_algorithms.data.types import (
    DatumSpec,
    PromptRows,
)
from rl_distributed.batch.batched_data_dict import (
    BatchedDataDict,
)
from rl_models.types import TrainingRows

__all__ = ["SFTCollator", "pad_rows", "rl_collate_fn"]


def pad_rows(
    rows: Sequence[Tensor], *, pad_value: int, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Right-pad 1-D int64 tensors to their longest, rounded up to `multiple`.

    Returns:
        [B, S] int64, and [B] int64 lengths.
    """
    lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    width = int(lengths.max(initial=0))
    # At least one column, because reductions over a width of 0 fail.
    width = max(-(-width // multiple) * multiple, 1)
    padded = np.full((len(rows), width), pad_value, np.int64)
    if len(rows) and lengths.any():
        filled = np.arange(width) < lengths[:, None]
        # One masked assignment is faster than a copy per row.
        padded[filled] = torch.cat(list(rows)).numpy()
    return torch.from_numpy(padded), torch.from_numpy(lengths)


def rl_collate_fn(batch: Sequence[DatumSpec], *, pad_token_id: int = 0) -> PromptRows:
    """Collate prompts.

    Returns:
        `input_ids` [B, S], `input_lengths` [B], `length` [B], `loss_multiplier` [B] as
        tensors; `message_log`, `extra_env_info`, `idx`, `task_name` and `stop_strings`
        as lists. The batch can be passed to `generate` unchanged.
    """
    input_ids, lengths = pad_rows(
        [datum["token_ids"] for datum in batch], pad_value=pad_token_id
    )
    columns: dict[str, Any] = {
        "input_ids": input_ids,
        "input_lengths": lengths,
        # A clone, so that changing one column in place leaves the other alone.
        "length": lengths.clone(),
        "loss_multiplier": torch.tensor(
            [datum["loss_multiplier"] for datum in batch], dtype=torch.float32
        ),
        "message_log": [datum["message_log"] for datum in batch],
        "extra_env_info": [datum["extra_env_info"] for datum in batch],
        "idx": [datum["idx"] for datum in batch],
        "task_name": [datum.get("task_name") for datum in batch],
    }
    if any(datum.get("stop_strings") for datum in batch):
        columns["stop_strings"] = [datum.get("stop_strings") for datum in batch]
    return BatchedDataDict(columns)


class SFTCollator:
    """Collate demonstrations into the columns that `PolicyInterface.train` takes.

    Args:
        pad_token_id: Padding token.
        make_sequence_length_divisible_by: Round the width up to a multiple of this.
    """

    def __init__(
        self, pad_token_id: int, make_sequence_length_divisible_by: int = 1
    ) -> None:
        self._pad_token_id = pad_token_id
        self._multiple = make_sequence_length_divisible_by

    def __call__(self, batch: Sequence[DatumSpec]) -> TrainingRows:
        """Return `input_ids` and `token_mask`, `input_lengths` and `sample_mask`."""
        input_ids, lengths = pad_rows(
            [datum["token_ids"] for datum in batch],
            pad_value=self._pad_token_id,
            multiple=self._multiple,
        )
        token_mask, _ = pad_rows(
            [datum["token_mask"] for datum in batch],
            pad_value=0,
            multiple=self._multiple,
        )
        return BatchedDataDict(
            {
                "input_ids": input_ids,
                "input_lengths": lengths,
                "token_mask": token_mask.to(torch.float32),
                "sample_mask": torch.tensor(
                    [datum["loss_multiplier"] for datum in batch], dtype=torch.float32
                ),
            }
        )
