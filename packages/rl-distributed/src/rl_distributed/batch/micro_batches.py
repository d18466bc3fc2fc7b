"""Batches on their way to data-parallel ranks: shards, global batches, micro-batches.

```
batch -- shard_by_batch_size --> shards, one per rank, each with a micro-batch plan
shard -- get_batch(i) ---------> its part of global batch i
       -- make_microbatch_iterator_... --> micro-batches
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from rl_distributed.batch.shard_plan import (
    DynamicBatchingArgs,
    SequencePackingArgs,
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
from rl_distributed.errors import BatchError

if TYPE_CHECKING:
    from rl_distributed.batch.batched_data_dict import SlicedDataDict

__all__ = ["MicroBatches"]

_PLAN = (
    "micro_batch_indices",
    "micro_batch_lengths",
    "elem_counts_per_gb",
    "padded_width",
)


class MicroBatches:
    """The part of `BatchedDataDict` that shards rows and iterates over micro-batches.

    A micro-batch plan speaks of row positions. Every shard of dynamic batching or
    sequence packing has one.
    """

    data: dict[str, Any]

    micro_batch_indices: list[list[list[int]]] | None = None
    """Chunk, micro-batch: `[start, end]` rows, from 0 in each chunk."""
    micro_batch_lengths: list[list[int]] | None = None
    """Chunk, micro-batch: its padded (dynamic) or packed length in tokens."""
    elem_counts_per_gb: list[int] | None = None
    """Chunk: its number of rows; with sequence packing only."""
    padded_width: int | None = None
    """The width of the input column before truncation; dynamic batching only."""

    if TYPE_CHECKING:  # what the table of columns provides

        @property
        def size(self) -> int:
            """The number of rows."""

        def slice(self, start: int, end: int) -> SlicedDataDict:
            """Rows `[start, end)`."""

        def _select(self, rows: np.ndarray[Any, Any]) -> dict[str, Any]: ...

        def _sliced(self, items: Iterable[tuple[str, Any]]) -> SlicedDataDict: ...

    # ------------------------------------------------------------------------ sharding

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: None = None,
        sequence_packing_args: None = None,
        rows_per_group: int = 1,
    ) -> list[SlicedDataDict]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        dynamic_batching_args: DynamicBatchingArgs,
        sequence_packing_args: None = None,
        rows_per_group: int = 1,
    ) -> tuple[list[SlicedDataDict], list[int]]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: None = None,
        *,
        sequence_packing_args: SequencePackingArgs,
        rows_per_group: int = 1,
    ) -> tuple[list[SlicedDataDict], list[int]]: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
        rows_per_group: int = 1,
    ) -> list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]:
        """Split the rows for `shards` data-parallel ranks.

        The rows are cut into global batches of `batch_size` (default: all of them),
        and each global batch into `shards` equal contiguous parts; shard k is the k-th
        part of each. `[0..7]` with 2 shards and batches of 4 gives `[0, 1, 4, 5]` and
        `[2, 3, 6, 7]`. `get_batch` on a shard gives the part of one global batch.

        Args:
            shards: The number of shards.
            batch_size: Rows of a global batch.
            allow_uneven_shards: Shards may differ by rows and be empty; without
                `batch_size` only.
            dynamic_batching_args: Group rows of similar length into micro-batches that
                have the same boundaries and widths in every shard.
            sequence_packing_args: Pack rows into micro-batches, equally many per shard.
            rows_per_group: So many rows that follow each other stay together and in
                order, in one shard and one micro-batch.

        Returns:
            The shards. With dynamic batching or sequence packing also, for each row of
            the concatenated shards, its original position: after
            `result = BatchedDataDict.from_batches(shards)`,
            `result.reorder_data(positions)` restores the order.

        Raises:
            BatchError: Sizes do not divide, arguments exclude each other, a column is
                missing, or (as `PackingError`) a row fits in no micro-batch.
        """
        if not self.data:
            raise BatchError("a batch without columns cannot be sharded")
        require_positive("rows_per_group", rows_per_group)
        require_multiple(
            "the number of rows", self.size, "rows_per_group", rows_per_group
        )
        if batch_size is not None:
            require_multiple("batch_size", batch_size, "rows_per_group", rows_per_group)
            batch_size //= rows_per_group
        groups = self.size // rows_per_group
        check_sizes(groups, shards, batch_size, allow_uneven_shards)
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise BatchError(
                "dynamic_batching_args and sequence_packing_args exclude each other"
            )
        args = dynamic_batching_args or sequence_packing_args
        if args is None:
            plan = plain_plan(groups, shards, batch_size, allow_uneven_shards)
            return self._apply(with_rows_of_groups(plan, rows_per_group), None)
        width: int | None = None
        lengths, longest = sequence_lengths(self.data, args)
        budget = args["max_tokens_per_microbatch"]
        if rows_per_group > 1:
            lengths, budget = group_lengths(lengths, longest, rows_per_group, args)
        if dynamic_batching_args is not None:
            width = longest
            dynamic = dynamic_batching_args.copy()
            dynamic["max_tokens_per_microbatch"] = budget
            plan = dynamic_plan(lengths, width, shards, batch_size, dynamic)
        elif sequence_packing_args is not None:
            plan = packed_plan(lengths, shards, batch_size, sequence_packing_args)
        if rows_per_group > 1:
            plan = with_rows_of_groups(plan, rows_per_group)
        return self._apply(plan, width), plan.order

    def _apply(self, plan: ShardPlan, width: int | None) -> list[SlicedDataDict]:
        shards = []
        for number, rows in enumerate(plan.rows):
            shard = self._sliced(self._select(rows).items())
            if plan.micro_batches is not None and plan.micro_batch_lengths is not None:
                shard.micro_batch_indices = plan.micro_batches[number]
                shard.micro_batch_lengths = plan.micro_batch_lengths[number]
                shard.padded_width = width
            if plan.chunk_rows is not None:
                shard.elem_counts_per_gb = plan.chunk_rows[number]
            shards.append(shard)
        return shards

    # -------------------------------------------------------------------- micro-batches

    def get_batch(
        self, batch_idx: int, batch_size: int | None = None
    ) -> SlicedDataDict:
        """The rows of one global batch on this shard, with its micro-batch plan.

        Args:
            batch_idx: The number of the global batch.
            batch_size: Its rows on this shard; not needed after sequence packing,
                where global batches differ.

        Raises:
            BatchError: There is no such global batch.
        """
        counts = self.elem_counts_per_gb
        if counts is None:
            if batch_size is None:
                raise BatchError(
                    "get_batch needs batch_size, unless the shard is sequence-packed"
                )
            require_positive("batch_size", batch_size)
            counts = [batch_size] * (self.size // batch_size)
        if not 0 <= batch_idx < len(counts):
            raise BatchError(
                f"there is no global batch {batch_idx}: the shard has {len(counts)} "
                f"of {batch_size or 'varying'} rows"
            )
        start = sum(counts[:batch_idx])
        batch = self.slice(start, start + counts[batch_idx])
        indices, lengths = self.micro_batch_indices, self.micro_batch_lengths
        if indices is not None and lengths is not None:
            if len(indices) != len(counts):
                raise BatchError(
                    f"the shard was made of {len(indices)} global batches, but "
                    f"batch_size {batch_size} cuts it into {len(counts)}"
                )
            batch.micro_batch_indices = [indices[batch_idx]]
            batch.micro_batch_lengths = [lengths[batch_idx]]
            batch.padded_width = self.padded_width
            if self.elem_counts_per_gb is not None:
                batch.elem_counts_per_gb = [counts[batch_idx]]
        return batch

    def make_microbatch_iterator(
        self, microbatch_size: int
    ) -> Iterator[SlicedDataDict]:
        """Slices of `microbatch_size` rows.

        Raises:
            BatchError: The rows are no multiple of it.
        """
        require_positive("microbatch_size", microbatch_size)
        rows = self.size
        require_multiple("the number of rows", rows, "microbatch_size", microbatch_size)
        return (
            self.slice(start, start + microbatch_size)
            for start in range(0, rows, microbatch_size)
        )

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1
    ) -> Iterator[SlicedDataDict]:
        """The micro-batches of dynamic batching, each cut to its padded length.

        Tensors as wide as the input column was at sharding are cut in `sequence_dim`.
        """
        bounds, lengths = self._single_plan("dynamic batching")
        width = self.padded_width

        def micro_batches() -> Iterator[SlicedDataDict]:
            for (start, end), length in zip(bounds, lengths, strict=True):
                part = self.slice(start, end)
                wide = [
                    key
                    for key, column in part.data.items()
                    if not isinstance(column, list)
                    and column.ndim > sequence_dim
                    and column.shape[sequence_dim] == width
                ]
                part.truncate_tensors(sequence_dim, length, wide)
                yield part

        return micro_batches()

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """The number of micro-batches of dynamic batching."""
        return len(self._single_plan("dynamic batching")[0])

    def make_microbatch_iterator_for_packable_sequences(
        self,
    ) -> Iterator[SlicedDataDict]:
        """The rows of each bin of sequence packing, still padded; packing is yours."""
        bounds, _ = self._single_plan("sequence packing")
        return (self.slice(start, end) for start, end in bounds)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """The number of bins, and the tokens of the fullest."""
        bounds, lengths = self._single_plan("sequence packing")
        return len(bounds), max(lengths, default=0)

    def _single_plan(self, what: str) -> tuple[list[list[int]], list[int]]:
        indices, lengths = self.micro_batch_indices, self.micro_batch_lengths
        packed = self.elem_counts_per_gb is not None
        if indices is None or lengths is None or packed != (what == "sequence packing"):
            raise BatchError(
                f"the batch has no micro-batches of {what}; make it with "
                "shard_by_batch_size and the matching arguments, and select rows before"
            )
        if len(indices) != 1:
            raise BatchError(
                f"the shard has {len(indices)} global batches; take one with get_batch"
            )
        return indices[0], lengths[0]

    def _drop_plan(self) -> None:
        for name in _PLAN:
            setattr(self, name, None)
