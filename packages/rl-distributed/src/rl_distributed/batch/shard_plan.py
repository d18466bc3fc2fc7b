"""Plan which rows go to which shard and micro-batch. Pure functions.

Legend: a *chunk* is a global batch (`batch_size` rows); a *shard* is the part of one
data-parallel rank; a *position* is a row's place in its shard. Within a shard the
chunks follow each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_distributed.batch.balance import bin_loads, deal_in_rounds, even_bounds
from rl_distributed.batch.columns import column_of, require_values
from rl_distributed.batch.packing import get_packer
from rl_distributed.batch.size_checks import require_multiple, require_positive
from rl_distributed.batch.token_budget import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    check_args,
    check_budget,
    check_shortest,
    greedy_cuts,
    padded_widths,
    round_up,
)
from rl_distributed.errors import BatchError, PackingError
from rl_distributed.suggestion import did_you_mean

__all__ = [
    "ShardPlan",
    "check_sizes",
    "dynamic_plan",
    "group_lengths",
    "packed_plan",
    "plain_plan",
    "sequence_lengths",
    "with_rows_of_groups",
]

Rows: TypeAlias = NDArray[np.int64]
MicroBatches: TypeAlias = list[list[int]]


@dataclass(frozen=True)
class ShardPlan:
    """The rows of every shard, and how they form micro-batches."""

    rows: list[Rows]
    """For each shard, the original row at each position."""
    micro_batches: list[list[MicroBatches]] | None = None
    """Shard, chunk, micro-batch: `[start, end)` positions, from 0 in each chunk."""
    micro_batch_lengths: list[list[list[int]]] | None = None
    """Shard, chunk, micro-batch: its padded or packed length in tokens."""
    chunk_rows: list[list[int]] | None = None
    """Shard, chunk: the number of rows; only where shards of a chunk can differ."""

    @property
    def order(self) -> list[int]:
        """The original row at each place of all shards, one after the other."""
        order: list[int] = np.concatenate(self.rows).tolist()
        return order


def check_sizes(
    num_rows: int, shards: int, batch_size: int | None, uneven: bool
) -> None:
    """Raise `BatchError` unless the rows can be cut into such shards."""
    require_positive("shards", shards)
    if batch_size is not None:
        if uneven:
            raise BatchError(
                "allow_uneven_shards and batch_size exclude each other: uneven shards "
                "are made of all rows at once"
            )
        require_positive("batch_size", batch_size)
        require_multiple("the number of rows", num_rows, "batch_size", batch_size)
    if not uneven:
        name = "the number of rows" if batch_size is None else "batch_size"
        require_multiple(name, batch_size or num_rows, "shards", shards)


def sequence_lengths(
    data: Mapping[str, Any], args: DynamicBatchingArgs | SequencePackingArgs
) -> tuple[Rows, int]:
    """Return the length of each row, and the width of the input column."""
    packing = "algorithm" in args
    check_args(args, SequencePackingArgs if packing else DynamicBatchingArgs)
    key, lengths_key = args["input_key"], args["input_lengths_key"]
    inputs, column = column_of(data, key), column_of(data, lengths_key)
    require_values(f"column {lengths_key!r}", column)
    lengths = np.asarray(column if isinstance(column, list) else column.tolist())
    if lengths.size == 0:
        lengths = np.zeros(0, dtype=np.int64)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise BatchError(f"column {lengths_key!r} must hold one integer per row")
    if isinstance(inputs, list):
        return lengths.astype(np.int64), int(lengths.max(initial=0))
    if inputs.ndim < 2:
        raise BatchError(
            f"column {key!r} must have a sequence dimension: its shape is "
            f"{list(inputs.shape)}"
        )
    width = int(inputs.shape[1])
    if lengths.size and lengths.max() > width:
        row = int(lengths.argmax())
        raise BatchError(
            f"column {lengths_key!r} says that row {row} has {lengths[row]} tokens, "
            f"but {key!r} is {width} wide"
        )
    return lengths.astype(np.int64), width


def group_lengths(
    lengths: Rows, width: int, rows_per_group: int, args: Mapping[str, Any]
) -> tuple[Rows, int]:
    """Take each group of rows as one row: its length, and the budget.

    Packed, a group is as long as its rows together; padded, it is as long as its
    longest row, and a micro-batch holds proportionally fewer of them.

    Raises:
        PackingError: A row is too short, or a group fits in no micro-batch.
    """
    budget = args["max_tokens_per_microbatch"]
    packs = "algorithm" in args
    # Row by row: what is too short would not show in the length of its group.
    check_shortest(lengths, args["input_lengths_key"], shortest=int(packs))
    groups = lengths.reshape(-1, rows_per_group)
    if packs:
        longest = round_up(groups, args["sequence_length_pad_multiple"]).sum(axis=1)
        padded, limit = longest, budget
    else:
        longest, limit = groups.max(axis=1, initial=0), budget // rows_per_group
        padded = padded_widths(longest, width, args["sequence_length_round"])
    if padded.size and padded.max() > limit:
        first = int(padded.argmax()) * rows_per_group
        raise PackingError(
            f"rows {first} to {first + rows_per_group - 1} belong together and fit in "
            f"no micro-batch: their lengths are {lengths[first:][:rows_per_group]}, "
            f"and max_tokens_per_microbatch is {budget}, padding included; raise it or "
            "shorten them"
        )
    return longest.astype(np.int64), limit


def with_rows_of_groups(plan: ShardPlan, rows_per_group: int) -> ShardPlan:
    """Return the plan of rows that a plan of groups stands for."""
    inside = np.arange(rows_per_group)
    rows = [(r[:, None] * rows_per_group + inside).ravel() for r in plan.rows]
    cuts = plan.micro_batches
    if cuts is not None:
        cuts = [
            [
                [[bound * rows_per_group for bound in cut] for cut in chunk]
                for chunk in s
            ]
            for s in cuts
        ]
    counts = plan.chunk_rows
    if counts is not None:
        counts = [[n * rows_per_group for n in shard] for shard in counts]
    return ShardPlan(rows, cuts, plan.micro_batch_lengths, counts)


def plain_plan(
    num_rows: int, shards: int, batch_size: int | None, uneven: bool
) -> ShardPlan:
    """Each chunk in contiguous parts, part k to shard k."""
    if uneven:
        bounds = even_bounds(num_rows, shards)
        return ShardPlan([np.arange(start, end) for start, end in bounds])
    chunk = batch_size or num_rows
    # Without rows, the chunk size would be zero.
    if num_rows == 0:
        return ShardPlan([np.arange(0)] * shards)
    grid = np.arange(num_rows).reshape(num_rows // chunk, shards, chunk // shards)
    return ShardPlan([grid[:, shard].ravel() for shard in range(shards)])


def dynamic_plan(
    lengths: Rows,
    width: int,
    shards: int,
    batch_size: int | None,
    args: DynamicBatchingArgs,
) -> ShardPlan:
    """Rows of similar length together; all shards have the same micro-batches.

    Within a chunk rows are sorted by length and dealt to the shards one each per
    round, the longest of a round to the shard with the fewest tokens. Micro-batches
    are cut at the same positions in every shard, so that ranks that work in lockstep
    have equally many, equally wide ones. Where rows do not divide evenly, some shards
    have one row less, in their first micro-batch.
    """
    budget, multiple = args["max_tokens_per_microbatch"], args["sequence_length_round"]
    padded = padded_widths(lengths, width, multiple)
    check_budget(lengths, padded, budget, args["input_lengths_key"])
    rows: list[list[Rows]] = [[] for _ in range(shards)]
    cuts: list[list[MicroBatches]] = [[] for _ in range(shards)]
    widths: list[list[list[int]]] = [[] for _ in range(shards)]
    # Carried over all chunks, so that a rank with more tokens in one gets
    # fewer in the next.
    totals = [0] * shards
    for start, end in _chunks(lengths.size, batch_size):
        rounds = np.array(
            deal_in_rounds(lengths[start:end], shards, totals), dtype=np.int64
        ).reshape(-1, shards)
        held = rounds >= 0
        # Missing entries (-1) index some other row, whose size must not count.
        sizes = np.where(held, padded[start:end][rounds], 0).max(axis=1, initial=0)
        bounds = greedy_cuts(sizes.tolist(), budget)
        for shard in range(shards):
            # Missing rows are in the first rounds, so all shards share
            # the later bounds.
            missing = len(rounds) - int(held[:, shard].sum())
            rows[shard].append(start + rounds[missing:, shard])
            totals[shard] += int(lengths[rows[shard][-1]].sum())
            cuts[shard].append(
                [[max(a - missing, 0), max(b - missing, 0)] for a, b in bounds]
            )
            widths[shard].append([int(sizes[b - 1]) for _, b in bounds])
    return ShardPlan([_join(parts) for parts in rows], cuts, widths)


def packed_plan(
    lengths: Rows, shards: int, batch_size: int | None, args: SequencePackingArgs
) -> ShardPlan:
    """Rows packed into bins; every shard gets equally many bins of each chunk.

    Bins of similar load are dealt to the shards one each per round, the fullest of a
    round to the shard with the fewest tokens, so both a step of all ranks and the
    totals of ranks are even.
    """
    budget = args["max_tokens_per_microbatch"]
    order = args.get("microbatch_order", "packer")
    if order not in ("packer", "largest_first"):
        raise BatchError(
            f"microbatch_order must be 'packer' or 'largest_first': got {order!r}"
            f"{did_you_mean(str(order), ('packer', 'largest_first'))}"
        )
    padded = round_up(lengths, args["sequence_length_pad_multiple"])
    check_budget(lengths, padded, budget, args["input_lengths_key"], shortest=1)
    packer = get_packer(
        args["algorithm"], budget, min_bin_count=shards, bin_count_multiple=shards
    )
    rows: list[list[Rows]] = [[] for _ in range(shards)]
    cuts: list[list[MicroBatches]] = [[] for _ in range(shards)]
    loads: list[list[list[int]]] = [[] for _ in range(shards)]
    totals = [0] * shards
    for start, end in _chunks(lengths.size, batch_size):
        bins = packer.pack(padded[start:end])
        tokens = bin_loads(bins, padded[start:end])
        rounds = deal_in_rounds(tokens, shards, totals)
        # Ordered by the lowest bin number of each round, roughly the
        # packer's own order.
        rounds = rounds[::-1] if order == "largest_first" else sorted(rounds, key=min)
        for shard in range(shards):
            own = [bins[row[shard]] for row in rounds]
            ends = np.cumsum([len(items) for items in own]).tolist()
            rows[shard].append(
                start
                + np.array(list(itertools.chain.from_iterable(own)), dtype=np.int64)
            )
            starts = [0, *ends[:-1]]
            cuts[shard].append([[a, b] for a, b in zip(starts, ends, strict=True)])
            loads[shard].append([int(tokens[row[shard]]) for row in rounds])
            totals[shard] += sum(loads[shard][-1])
    # Packed shards differ in rows, so `get_batch` needs these counts to find a chunk.
    counts = [[part.size for part in parts] for parts in rows]
    return ShardPlan([_join(parts) for parts in rows], cuts, loads, counts)


def _chunks(num_rows: int, batch_size: int | None) -> list[tuple[int, int]]:
    # `range` rejects a step of zero.
    size = batch_size or max(num_rows, 1)
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _join(parts: list[Rows]) -> Rows:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
