"""Conversations of several training rows, because their template rewrote the past.

A chat template may write earlier messages differently once later ones follow: strip
what the model thought, move the system prompt. Then the tokens that were sampled are no
longer what the next answer is conditioned on, and one row of tokens cannot hold both.
The conversation branches: what was sampled so far stays as it is, with the prompt that
it had, and the next answer continues the text as it now is.

Shapes: N rows, S tokens wide.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.errors import RolloutError
from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = ["Branch", "unfold_branches"]


@dataclass(frozen=True, slots=True)
class Branch:
    """The part of a conversation before its text was rewritten: [T] columns."""

    input_ids: Tensor
    """[T] int64."""
    token_mask: Tensor
    """[T] 1.0 on sampled tokens."""
    generation_logprobs: Tensor
    """[T], 0.0 elsewhere."""
    token_versions: Tensor
    """[T] int64, -1 elsewhere."""


_COLUMNS = tuple(field.name for field in fields(Branch))


def _refuse_token_columns(rows: BatchedDataDict[Any]) -> None:
    for name, column in rows.items():
        if name not in _COLUMNS and isinstance(column, Tensor) and column.dim() > 1:
            raise RolloutError(
                f"column {name!r} has a value for each token, which the parts of a "
                "conversation that its chat template rewrote do not have: leave out "
                "what makes it, or set rollout.on_template_rewrite=error"
            )


def unfold_branches(
    rows: BatchedDataDict[Any], *, pad_token_id: int = 0
) -> BatchedDataDict[Any]:
    """Give each branch a row of its own, behind those that are there.

    It has the row's values in all columns but those of the tokens. Each sampled token
    is then in one row, behind the text that it was sampled after.

    Args:
        rows: Columns that are trained on, and `branches`, a list of tuples of `Branch`.
            Without that column nothing changes.
        pad_token_id: What lies behind the end of a row.

    Returns:
        Rows without the column `branches`. Where there are any, the columns
        `conversation_index` and `part_index` tell their places; see `Timeline`.

    Raises:
        RolloutError: There are branches, and a column of tokens that they do not have.
    """
    if "branches" not in rows:
        return rows
    branches: list[tuple[Branch, ...]] = rows["branches"]
    rows = rows.copy()
    del rows["branches"]
    parts = [part for row in branches for part in row]
    if not parts:
        return rows
    owner = [index for index, row in enumerate(branches) for _ in row]
    rows["conversation_index"] = torch.arange(len(branches))
    rows["part_index"] = torch.tensor([len(row) for row in branches])
    added = rows.select_indices(owner)
    places = [place for row in branches for place in range(len(row))]
    added["part_index"] = torch.tensor(places)
    lengths = [len(part.input_ids) for part in parts]
    pads = {"input_ids": pad_token_id, "token_versions": -1}
    _refuse_token_columns(rows)
    for name in _COLUMNS:
        if name not in rows:
            continue
        column = torch.full(
            (len(parts), max(lengths)), pads.get(name, 0), dtype=rows[name].dtype
        )
        for row, part in enumerate(parts):
            column[row, : lengths[row]] = getattr(part, name)
        added[name] = column
    added["input_lengths"] = torch.tensor(lengths, dtype=rows["input_lengths"].dtype)
    return BatchedDataDict.from_batches([rows, added], pads)
