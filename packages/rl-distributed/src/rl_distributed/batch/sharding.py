"""Plan the shards of a batch from its columns: which rows go to which rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_distributed.batch.shard_plan import (
    ShardPlan,
    check_sizes,
    dynamic_plan,
    group_lengths,
    packed_plan,
    plain_plan,
    sequence_lengths,
    with_rows_of_groups,
)
from rl_distributed.batch.size_checks import require_multiple, require_positive
from rl_distributed.batch.token_budget import DynamicBatchingArgs, SequencePackingArgs
from rl_distributed.errors import BatchError

__all__ = ["plan_shards"]


def plan_shards(
    data: Mapping[str, Any],
    num_rows: int,
    shards: int,
    *,
    batch_size: int | None,
    allow_uneven_shards: bool,
    dynamic_batching_args: DynamicBatchingArgs | None,
    sequence_packing_args: SequencePackingArgs | None,
    rows_per_group: int,
) -> tuple[ShardPlan, int | None]:
    """Plan the shards of `BatchedDataDict.shard_by_batch_size`.

    Returns:
        The plan, and the width of the input column where dynamic batching cuts it.

    Raises:
        BatchError: As `shard_by_batch_size`.
    """
    if not data:
        raise BatchError("a batch without columns cannot be sharded")
    require_positive("rows_per_group", rows_per_group)
    require_multiple("the number of rows", num_rows, "rows_per_group", rows_per_group)
    if batch_size is not None:
        require_multiple("batch_size", batch_size, "rows_per_group", rows_per_group)
        batch_size //= rows_per_group
    groups = num_rows // rows_per_group
    check_sizes(groups, shards, batch_size, allow_uneven_shards)
    if dynamic_batching_args is not None and sequence_packing_args is not None:
        raise BatchError(
            "dynamic_batching_args and sequence_packing_args exclude each other"
        )
    args = dynamic_batching_args or sequence_packing_args
    if args is None:
        plan = plain_plan(groups, shards, batch_size, allow_uneven_shards)
        return with_rows_of_groups(plan, rows_per_group), None
    width: int | None = None
    lengths, longest = sequence_lengths(data, args)
    budget = args["max_tokens_per_microbatch"]
    if rows_per_group > 1:
        lengths, budget = group_lengths(lengths, longest, rows_per_group, args)
    if dynamic_batching_args is not None:
        width = longest
        # A copy, because the settings belong to the caller.
        dynamic = dynamic_batching_args.copy()
        dynamic["max_tokens_per_microbatch"] = budget
        plan = dynamic_plan(lengths, width, shards, batch_size, dynamic)
    elif sequence_packing_args is not None:
        plan = packed_plan(lengths, shards, batch_size, sequence_packing_args)
    if rows_per_group > 1:
        plan = with_rows_of_groups(plan, rows_per_group)
    return plan, width
