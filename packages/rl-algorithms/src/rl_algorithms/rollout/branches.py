"""Conversations split into several training rows when their template rewrites the past.

A chat template may render earlier messages differently once later ones follow: it
strips the model's reasoning or moves the system prompt. The next answer is then no
longer conditioned on the tokens that were sampled, and one row of tokens cannot hold
both. The conversation branches: the tokens sampled so far keep the prompt that they
were sampled after, and the next answer continues the text as rendered now.

Shapes: N rows, S tokens wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rl_algorithms.errors import RolloutError
from rl_distributed.batch.batched_data_dict import AnyRows, BatchedDataDict

__all__ = ["Branch", "unfold_branches"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Branch:
    """The part of a conversation before its text was rewritten: [T] columns."""

    input_ids: Tensor
    """[T] int64."""
    token_mask: Tensor
    """[T]; 1.0 on sampled tokens, 0.0 elsewhere."""
    generation_logprobs: Tensor
    """[T] log-probs of the sampled tokens; 0.0 elsewhere."""
    token_versions: Tensor
    """[T] int64 weight versions of the sampled tokens; -1 elsewhere."""
    reward: float | None = None
    """Reward of its own; None: that of the row that it belongs to."""
    name: str = ""
    """Group of branches with rewards of their own that are compared with each other."""


_COLUMNS = ("input_ids", "token_mask", "generation_logprobs", "token_versions")


def _refuse_token_columns(rows: AnyRows) -> None:
    for name, column in rows.items():
        if name not in _COLUMNS and isinstance(column, Tensor) and column.dim() > 1:
            raise RolloutError(
                f"column {name!r} has a value per token, which the branches of a "
                "conversation that its chat template rewrote do not have: remove the "
                "code that adds it, or set rollout.on_template_rewrite=error"
            )


def unfold_branches(
    rows: BatchedDataDict[T], *, pad_token_id: int = 0
) -> BatchedDataDict[T]:
    """Append a row for each branch.

    A new row copies all columns of its conversation except those of the tokens. Each
    sampled token is then in exactly one row, after the text that it was sampled after.
    Branches with rewards of their own become conversations of their own; those of one
    name and prompt form a group.

    Args:
        rows: Columns to train on, and `branches`, a list of tuples of `Branch`. Without
            that column nothing changes.
        pad_token_id: Token that pads rows on the right.

    Returns:
        Rows without the column `branches`. If there are any branches, the columns
        `conversation_index` and `part_index` give their positions; see `Timeline`.

    Raises:
        RolloutError: There are branches, and a token column that they do not have.
    """
    if "branches" not in rows:
        return rows
    branches: list[tuple[Branch, ...]] = rows["branches"]
    # A shallow copy: the caller's batch keeps its column `branches`.
    rows = rows.copy()
    del rows["branches"]
    parts = [part for row in branches for part in row]
    if not parts:
        return rows
    owner = [index for index, row in enumerate(branches) for _ in row]
    rows["conversation_index"] = torch.arange(len(branches))
    # The row itself holds the end of the conversation, after all of its branches.
    rows["part_index"] = torch.tensor([len(row) for row in branches])
    added = rows.select_indices(owner)
    places = [place for row in branches for place in range(len(row))]
    added["part_index"] = torch.tensor(places)
    lengths = [len(part.input_ids) for part in parts]
    pads = {"input_ids": pad_token_id, "token_versions": -1}
    # Such a column would be copied from another part, whose tokens differ.
    _refuse_token_columns(rows)
    for name in _COLUMNS:
        if name not in rows:
            continue
        # In the dtype of the column, so that both can be concatenated.
        column = torch.full(
            (len(parts), max(lengths)), pads.get(name, 0), dtype=rows[name].dtype
        )
        for row, part in enumerate(parts):
            column[row, : lengths[row]] = getattr(part, name)
        added[name] = column
    added["input_lengths"] = torch.tensor(lengths, dtype=rows["input_lengths"].dtype)
    _reward_apart(rows, added, owner, parts)
    return BatchedDataDict.from_batches([rows, added], pads)


def _reward_apart(
    rows: AnyRows,
    added: AnyRows,
    owner: list[int],
    parts: list[Branch],
) -> None:
    """Make branches with rewards of their own conversations by themselves.

    Args:
        rows: All rows without the branches.
        added: The branches' rows, which are changed.
        owner: The row that each belongs to.
        parts: The branches.
    """
    groups = rows.get("group_index", rows["conversation_index"])
    next_group = int(groups.max()) + 1
    next_conversation = len(groups)
    group_of: dict[tuple[int, str], int] = {}
    conversation_of: dict[tuple[int, str], int] = {}
    num_parts: dict[int, int] = {}
    for place, (row, part) in enumerate(zip(owner, parts, strict=True)):
        if part.reward is None:
            continue
        group = (int(groups[row]), part.name)
        conversation = conversation_of.setdefault(
            (row, part.name), next_conversation + len(conversation_of)
        )
        added["conversation_index"][place] = conversation
        added["part_index"][place] = num_parts.get(conversation, 0)
        num_parts[conversation] = num_parts.get(conversation, 0) + 1
        for name, column in added.items():
            if name == "rewards":
                column[place] = part.reward
            elif name == "group_index":
                found = next_group + len(group_of)
                column[place] = group_of.setdefault(group, found)
            elif name.startswith("reward/"):
                # What the task's reward consists of says nothing of this one.
                column[place] = torch.nan
