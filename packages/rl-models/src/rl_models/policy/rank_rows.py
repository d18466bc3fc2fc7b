"""Distribution of the rows of a batch over training ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from rl_distributed.batch.batched_data_dict import (
    AnyRows,
    BatchedDataDict,
)
from rl_distributed.batch.schema import Schema
from rl_distributed.errors import BatchError
from rl_models.config import PolicyConfig
from rl_models.errors import ContextLengthError

__all__ = [
    "check_rows",
    "fit_shares",
    "logprob_budget",
    "shard",
    "train_budget",
    "with_extra_rows",
]

T = TypeVar("T")


def check_rows(data: AnyRows, schema: Schema[object], row_limit: int) -> None:
    """Refuse a batch that the ranks cannot take.

    Args:
        data: The batch.
        schema: Its columns.
        row_limit: Longest row in tokens.

    Raises:
        BatchError: It has no rows, or lacks a column.
        ContextLengthError: A row is too long.
    """
    schema.check(data)
    if data.size == 0:
        raise BatchError("the batch has no rows; the policy needs at least one")
    lengths, width = data["input_lengths"], data["input_ids"].shape[1]
    row, longest = int(lengths.argmax()), int(lengths.max())
    if longest > row_limit:
        raise ContextLengthError(
            f"row {row} of the batch has {longest} tokens, more than "
            f"policy.max_total_sequence_length = {row_limit}; shorten it, or raise the "
            "limit up to the model's context"
        )
    # A length beyond the columns would read the next row's tokens once rows are packed.
    if longest > width or int(lengths.min()) < 1:
        raise BatchError(
            "input_lengths must be from 1 to the width of input_ids "
            f"({width}): got {int(lengths.min())} to {longest}"
        )


def fit_shares(
    data: BatchedDataDict[T], global_batch_size: int, shares: int, group: int
) -> tuple[BatchedDataDict[T], int]:
    """Pad a global batch with rows that do not count, if its shares are uneven.

    Args:
        data: The rows.
        global_batch_size: Rows of a global batch.
        shares: Shares that each is cut into.
        group: Rows that the loss compares with each other.

    Returns:
        The rows, and the number of rows per global batch.

    Raises:
        BatchError: The rows are no whole number of global batches or groups.
    """
    if global_batch_size % group:
        raise BatchError(
            f"global_batch_size must be a multiple of {group}, the rows that the loss "
            f"compares with each other: got {global_batch_size}; use "
            f"{global_batch_size + -global_batch_size % group}"
        )
    if data.size % global_batch_size:
        raise BatchError(
            "policy.train needs a multiple of the global batch size in rows: got "
            f"{data.size} rows with global_batch_size {global_batch_size}; drop "
            f"{data.size % global_batch_size} rows or pass "
            f"global_batch_size={data.size}"
        )
    extra = -global_batch_size % (shares * group)
    if not extra:
        return data, global_batch_size
    # Only after the last batch: rows in between would belong to several batches.
    if data.size != global_batch_size:
        raise BatchError(
            "global_batch_size must be a multiple of data-parallel size where train "
            f"gets several global batches: got {global_batch_size} with {shares} "
            f"ranks; use {global_batch_size + extra}"
        )
    filled = with_extra_rows(data, extra, group)
    filled["sample_mask"][data.size :] = 0
    return filled, global_batch_size + extra


def with_extra_rows(
    data: BatchedDataDict[T], extra: int, group: int = 1
) -> BatchedDataDict[T]:
    """Return the batch followed by copies of its last group of rows."""
    # Copies, because rows without tokens would be refused, and whole groups, which the
    # loss compares within.
    last = range(data.size - group, data.size)
    return data.select_indices([*range(data.size), *[*last] * (extra // group)])


def shard(
    data: BatchedDataDict[T],
    global_batch_size: int,
    shares: int,
    budget: dict[str, Any],
) -> tuple[Sequence[BatchedDataDict[T]], list[int] | None]:
    """Return the shard of each rank, and the new order of rows if it has changed."""
    if len(budget) > ("rows_per_group" in budget):
        shards, order = data.shard_by_batch_size(shares, global_batch_size, **budget)
        return shards, order
    if shares == 1:
        return [data], None  # without a copy
    return data.shard_by_batch_size(shares, global_batch_size, **budget), None


def train_budget(config: PolicyConfig) -> dict[str, Any]:
    """Return the arguments of `shard` for a token budget; empty: there is none."""
    section = config.sequence_packing or config.dynamic_batching
    return _budget(config, section.train_mb_tokens) if section else {}


def logprob_budget(config: PolicyConfig) -> dict[str, Any]:
    """Return the same for log-probs, which take more tokens at a time."""
    # Without gradients no activations are kept.
    section = config.sequence_packing or config.dynamic_batching
    if section is None:
        return {}
    return _budget(config, section.logprob_mb_tokens or section.train_mb_tokens)


def _budget(config: PolicyConfig, tokens: int) -> dict[str, Any]:
    """Return the arguments of `shard_by_batch_size` for a token budget."""
    columns = {
        "max_tokens_per_microbatch": tokens,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    if config.sequence_packing is not None:
        packing = config.sequence_packing
        columns["algorithm"] = packing.algorithm
        columns["sequence_length_pad_multiple"] = packing.sequence_length_pad_multiple
        return {"sequence_packing_args": columns}
    if config.dynamic_batching is not None:
        columns["sequence_length_round"] = config.dynamic_batching.sequence_length_round
        return {"dynamic_batching_args": columns}
    return {}
