"""Split a shard into its global batches, and these into micro-batches.

```
batch -- shard_by_batch_size --> shards, one per rank, each with a micro-batch plan
shard -- global_batch(i) ------> its part of global batch i
       -- bounds --------------> where each micro-batch begins and ends
       -- cut -----------------> the rows and columns of one
```
Every walk over micro-batches is made of these two, also that of a trainer which chooses
other widths. They underlie the methods of `BatchedDataDict`, and access shards
through a protocol, so that the table of columns can be built on top of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rl_distributed.batch.size_checks import require_multiple, require_positive
from rl_distributed.errors import BatchError

__all__ = [
    "PLAN_FIELDS",
    "MicroBatch",
    "Shard",
    "bounds",
    "cut",
    "dynamic_shapes",
    "fixed_size",
    "global_batch",
    "packed_bins",
    "single_plan",
]

PLAN_FIELDS = (
    "micro_batch_indices",
    "micro_batch_lengths",
    "elem_counts_per_gb",
    "padded_width",
)
"""The attributes of a shard that hold its micro-batch plan."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows `[start, stop)` of a shard, `width` tokens wide."""

    start: int
    stop: int
    width: int | None = None
    """None: as wide as the shard."""


class Shard(Protocol):
    """Rows with a micro-batch plan; the plan speaks of row positions."""

    data: dict[str, Any]
    micro_batch_indices: list[list[list[int]]] | None
    micro_batch_lengths: list[list[int]] | None
    elem_counts_per_gb: list[int] | None
    padded_width: int | None

    @property
    def size(self) -> int:
        """The number of rows."""

    def truncate_tensors(
        self, dim: int, truncated_len: int, keys: Sequence[str] | None = None
    ) -> None:
        """Cut tensors in a dimension, in place."""


ShardT = TypeVar("ShardT", bound=Shard, covariant=True)


class Sliceable(Shard, Protocol[ShardT]):
    """A shard of which parts can be taken."""

    def slice(self, start: int, end: int) -> ShardT:
        """Return rows `[start, end)`."""


def global_batch(
    shard: Sliceable[ShardT], batch_idx: int, batch_size: int | None
) -> ShardT:
    """Return the rows of one global batch on this shard, with its micro-batch plan."""
    counts = shard.elem_counts_per_gb
    if counts is None:
        if batch_size is None:
            raise BatchError(
                "get_batch needs batch_size, unless the shard is sequence-packed"
            )
        require_positive("batch_size", batch_size)
        counts = [batch_size] * (shard.size // batch_size)
    if not 0 <= batch_idx < len(counts):
        raise BatchError(
            f"there is no global batch {batch_idx}: the shard has {len(counts)} "
            f"of {batch_size or 'varying'} rows"
        )
    # After packing, global batches of a shard may differ in size.
    start = sum(counts[:batch_idx])
    batch = shard.slice(start, start + counts[batch_idx])
    indices, lengths = shard.micro_batch_indices, shard.micro_batch_lengths
    if indices is not None and lengths is not None:
        # Other bounds than the plan's would cut through micro-batches.
        if len(indices) != len(counts):
            raise BatchError(
                f"the shard was made of {len(indices)} global batches, but "
                f"batch_size {batch_size} cuts it into {len(counts)}"
            )
        batch.micro_batch_indices = [indices[batch_idx]]
        batch.micro_batch_lengths = [lengths[batch_idx]]
        batch.padded_width = shard.padded_width
        if shard.elem_counts_per_gb is not None:
            batch.elem_counts_per_gb = [counts[batch_idx]]
    return batch


def bounds(shard: Shard, microbatch_size: int) -> list[tuple[int, int]]:
    """Return `(start, stop)` of each micro-batch of the only global batch.

    Args:
        shard: Its plan is followed, if it has one.
        microbatch_size: Rows per micro-batch without a plan; the last one may have
            fewer.

    Raises:
        BatchError: The shard has several global batches.
    """
    if shard.micro_batch_indices is not None:
        return [(start, stop) for start, stop in _only(shard.micro_batch_indices)]
    return _pieces(shard.size, microbatch_size)


def cut(
    shard: Sliceable[ShardT], part: MicroBatch, shard_width: int | None, dim: int = 1
) -> ShardT:
    """Return the rows of a micro-batch; tensors are views.

    Args:
        shard: The rows.
        part: Its rows and width.
        shard_width: Tensors of this size in `dim`, which hold one entry per token, are
            cut to the micro-batch's width; others stay whole.
        dim: The dimension of tokens.
    """
    rows = shard.slice(part.start, part.stop)
    if part.width is None or shard_width is None or part.width >= shard_width:
        return rows
    wide = [
        key
        for key, column in rows.data.items()
        if not isinstance(column, list)
        and column.ndim > dim
        and column.shape[dim] == shard_width
    ]
    rows.truncate_tensors(dim, part.width, wide)
    return rows


def fixed_size(shard: Sliceable[ShardT], microbatch_size: int) -> Iterator[ShardT]:
    """Iterate over slices of `microbatch_size` rows."""
    require_positive("microbatch_size", microbatch_size)
    rows = shard.size
    require_multiple("the number of rows", rows, "microbatch_size", microbatch_size)
    return (shard.slice(*piece) for piece in _pieces(rows, microbatch_size))


def dynamic_shapes(shard: Sliceable[ShardT], sequence_dim: int) -> Iterator[ShardT]:
    """Iterate over the micro-batches of dynamic batching, each cut to its length."""
    plan, lengths = single_plan(shard, "dynamic batching")
    return (
        cut(shard, MicroBatch(start, stop, width), shard.padded_width, sequence_dim)
        for (start, stop), width in zip(plan, lengths, strict=True)
    )


def packed_bins(shard: Sliceable[ShardT]) -> Iterator[ShardT]:
    """Iterate over the rows of each bin of sequence packing, still padded."""
    plan, _ = single_plan(shard, "sequence packing")
    return (shard.slice(*rows) for rows in plan)


def single_plan(shard: Shard, what: str) -> tuple[list[list[int]], list[int]]:
    """Return the bounds and lengths of the micro-batches of the only global batch.

    Raises:
        BatchError: The shard has no plan of this kind, or several global batches.
    """
    indices, lengths = shard.micro_batch_indices, shard.micro_batch_lengths
    packed = shard.elem_counts_per_gb is not None
    if indices is None or lengths is None or packed != (what == "sequence packing"):
        raise BatchError(
            f"the batch has no micro-batches of {what}; make it with "
            "shard_by_batch_size and the matching arguments, and select rows before"
        )
    return _only(indices), lengths[0]


def _pieces(num_rows: int, size: int) -> list[tuple[int, int]]:
    starts = range(0, num_rows, size)
    return [(start, min(start + size, num_rows)) for start in starts]


def _only(plans: list[list[list[int]]]) -> list[list[int]]:
    """Return the plan of the only global batch."""
    if len(plans) != 1:
        raise BatchError(
            f"the shard has {len(plans)} global batches; take one with get_batch"
        )
    return plans[0]
