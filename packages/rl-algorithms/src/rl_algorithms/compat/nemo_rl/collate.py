"""Collate functions of NeMo RL, whose rows carry tokens in their message logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_algorithms.data import compat
from rl_distributed.batch.batched_data_dict import (
    AnyRows,
    BatchedDataDict,
)

__all__ = ["preference_collate_fn", "rl_collate_fn"]

Datum = Mapping[str, Any]


def rl_collate_fn(data_batch: Sequence[Datum]) -> AnyRows:
    """Collate prompts.

    Args:
        data_batch: Rows with `message_log`, `length`, `loss_multiplier`,
            `extra_env_info`, `idx`, and optionally `task_name` and `stop_strings`.

    Returns:
        `length`, `loss_multiplier` and `batch_max_length` [B] as tensors, the others
        as lists.
    """
    length = torch.tensor([datum["length"] for datum in data_batch])
    multiplier = torch.tensor([datum["loss_multiplier"] for datum in data_batch])
    lists = {
        name: [datum[name] for datum in data_batch]
        for name in ("message_log", "extra_env_info", "idx")
    }
    optional = {
        name: [datum.get(name) for datum in data_batch]
        for name in ("task_name", "stop_strings")
    }
    return BatchedDataDict(
        {
            **lists,
            **optional,
            "length": length,
            "loss_multiplier": multiplier,
            "batch_max_length": torch.full_like(length, int(length.max())),
        }
    )


def preference_collate_fn(
    data_batch: Sequence[Datum],
    tokenizer: Any,
    make_sequence_length_divisible_by: int,
    add_loss_mask: bool,
) -> AnyRows:
    """Collate pairs as rows chosen, rejected, chosen, ...

    Args:
        data_batch: Rows with `message_log_chosen`, `message_log_rejected` and
            `loss_multiplier`.
        tokenizer: Gives the padding token.
        make_sequence_length_divisible_by: Round the width up to a multiple of this.
        add_loss_mask: Whether to add `token_mask`, which covers the last message.

    Returns:
        `input_ids` [2 B, S], `input_lengths` [2 B], `sample_mask` [2 B], and
        `token_mask` [2 B, S] if requested.
    """
    sides = ("message_log_chosen", "message_log_rejected")
    logs = [datum[side] for datum in data_batch for side in sides]
    if add_loss_mask:
        compat.add_loss_mask_to_message_log(logs, only_unmask_final=True)
    flat, lengths = compat.batched_message_log_to_flat_message(
        logs, {"token_ids": tokenizer.pad_token_id}, make_sequence_length_divisible_by
    )
    multiplier = torch.tensor([datum["loss_multiplier"] for datum in data_batch])
    columns = {
        "input_ids": flat["token_ids"],
        "input_lengths": lengths,
        "sample_mask": multiplier.repeat_interleave(len(sides)),
    }
    if add_loss_mask:
        columns["token_mask"] = flat["token_loss_mask"]
    return BatchedDataDict(columns)
