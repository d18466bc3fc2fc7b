"""`BatchedDataDict`: columns of equal length that can be sharded, packed and reordered.

A column is a tensor with the rows in dimension 0, or a list. numpy arrays are converted
when they are put in: numbers to a tensor that shares their memory, strings and objects
to a list. Anything else is refused.

Sharding for dynamic batching or sequence packing leaves a micro-batch plan on each
shard. The plan speaks of row positions: what keeps the rows in place (`copy`, `to`,
`truncate_tensors`, pickling, setting a column) keeps it, `get_batch` cuts out the part
of one global batch, and everything else drops it.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np
import torch
import torch.distributed as dist

from rl_distributed import columns
from rl_distributed.counts import require_multiple, require_positive
from rl_distributed.errors import BatchError
from rl_distributed.shard_plan import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    ShardPlan,
    check_sizes,
    dynamic_plan,
    packed_plan,
    plain_plan,
    sequence_lengths,
)
from rl_distributed.tensor_buffers import decode, encode

__all__ = [
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "SequencePackingArgs",
    "SlicedDataDict",
]

DictT = TypeVar("DictT")

_PLAN = (
    "micro_batch_indices",
    "micro_batch_lengths",
    "elem_counts_per_gb",
    "padded_width",
)


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """A dict of columns with the same number of rows.

    Pickling moves tensors out of band (see `tensor_buffers`): values only, to the CPU.
    Tensors received through Ray share read-only memory; call `clone` before writing
    to them in place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batch_indices: list[list[list[int]]] | None = None
        """Chunk, micro-batch: `[start, end]` rows, from 0 in each chunk."""
        self.micro_batch_lengths: list[list[int]] | None = None
        """Chunk, micro-batch: its padded (dynamic) or packed length in tokens."""
        self.elem_counts_per_gb: list[int] | None = None
        """Chunk: its number of rows; with sequence packing only."""
        self.padded_width: int | None = None
        """The width of the input column before truncation; dynamic batching only."""
        super().__init__(*args, **kwargs)

    def __setitem__(self, key: str, item: Any) -> None:
        super().__setitem__(key, columns.as_column(key, item))

    # ---------------------------------------------------------------- what it holds

    @property
    def size(self) -> int:
        """The number of rows; 0 without columns.

        Raises:
            BatchError: Columns differ in their number of rows.
        """
        sizes = {key: len(column) for key, column in self.data.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{key} has {size}" for key, size in sizes.items())
            raise BatchError(f"columns must have the same number of rows: {listed}")
        return next(iter(sizes.values()), 0)

    def get_dict(self) -> dict[str, Any]:
        """The underlying dict."""
        return self.data

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{key}=list[{len(column)}]"
            if isinstance(column, list)
            else f"{key}={str(column.dtype).removeprefix('torch.')}{list(column.shape)}"
            for key, column in self.data.items()
        )
        return f"{type(self).__name__}({shown})"

    # ------------------------------------------------------------- copy and transport

    def copy(self) -> Self:
        """A shallow copy: the same columns and micro-batch plan."""
        return self._like(self.data, keep_plan=True)

    def clone(self) -> Self:
        """A copy whose tensors have memory of their own; lists are copied shallowly."""
        cloned = {
            key: list(column) if isinstance(column, list) else column.clone()
            for key, column in self.data.items()
        }
        return self._like(cloned, keep_plan=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._like(copy.deepcopy(self.data, memo), keep_plan=True)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {key: value for key, value in self.__dict__.items() if key != "data"}
        encoded = {key: encode(column) for key, column in self.data.items()}
        return _rebuild, (type(self), encoded, state)

    def to(self, device: torch.device | str | int) -> Self:
        """Move the tensors to a device, in place; returns self."""
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor):
                self.data[key] = column.to(device)
        return self

    def all_gather(
        self,
        group: dist.ProcessGroup | None = None,
        pad_value_dict: Mapping[str, float | int] | None = None,
    ) -> Self:
        """The rows of all ranks of a process group, in rank order, on every rank.

        Ranks may have different numbers of rows and widths; padding is as in
        `from_batches`.
        """
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, self, group=group)
        devices = {
            key: column.device
            for key, column in self.data.items()
            if isinstance(column, torch.Tensor)
        }
        result = self.from_batches(gathered, pad_value_dict)
        for key, device in devices.items():
            result.data[key] = result.data[key].to(device)
        return result

    # ------------------------------------------------------------------ rows in and out

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, float | int] | None = None,
    ) -> Self:
        """The rows of all batches, one below the other.

        Dimension 1 of tensors is right-padded to the widest batch, with the column's
        value in `pad_value_dict` or 0. Batches without columns are skipped.

        Raises:
            BatchError: A batch lacks a column of another, or a column differs in kind,
                dtype, device or in dimensions other than 0 and 1.
        """
        parts = [cls(batch) for batch in batches if len(batch)]
        for part in parts:
            _ = part.size
        pads = pad_value_dict or {}
        result = cls()
        for key in sorted({key for part in parts for key in part}, key=str):
            missing = [
                place
                for place, batch in enumerate(batches)
                if len(batch) and key not in batch
            ]
            if missing:
                raise BatchError(
                    f"column {key!r} is missing in batches {missing} of {len(batches)}"
                )
            result.data[key] = columns.concat_columns(
                key, [part.data[key] for part in parts], pads.get(key, 0)
            )
        return result

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """Rows `[start, end)`; tensors are views.

        Raises:
            BatchError: The range does not lie within the rows.
        """
        if not 0 <= start <= end <= self.size:
            raise BatchError(
                f"rows {start}..{end} do not lie within the {self.size} rows"
            )
        return self._sliced(
            (key, columns.cut_column(column, start, end))
            for key, column in self.data.items()
        )

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """Part `rank` of `chunks` equal contiguous parts; tensors are copies.

        Raises:
            BatchError: The rows do not divide evenly, or there is no such part.
        """
        require_positive("chunks", chunks)
        if not 0 <= rank < chunks:
            raise BatchError(f"rank must be in 0..{chunks - 1}: got {rank}")
        require_multiple("the number of rows", self.size, "chunks", chunks)
        rows = self.size // chunks
        return self.slice(rank * rows, (rank + 1) * rows).clone()

    def select_indices(
        self, indices: Sequence[int] | torch.Tensor | np.ndarray[Any, Any]
    ) -> Self:
        """The given rows in the given order; or, with booleans, the rows that are true.

        Raises:
            BatchError: An index lies outside the rows, or is no integer.
        """
        rows = columns.row_indices(indices, self.size)
        return self._like(self._select(rows))

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row `num_repeats` times in a row; list items are independent copies."""
        require_positive("num_repeats", num_repeats)
        _ = self.size
        return self._like(
            {
                key: columns.repeat_column(column, num_repeats)
                for key, column in self.data.items()
            }
        )

    def reorder_data(self, reorded_indices: Sequence[int]) -> None:
        """Put rows back to their original order, in place.

        `reorded_indices[i]` is the original position of the row that is now at i, as
        `shard_by_batch_size` returns it for the concatenation of its shards.

        Raises:
            BatchError: The indices are no permutation of the rows.
        """
        order = np.asarray(reorded_indices, dtype=np.int64).reshape(-1)
        rows = self.size
        if order.size != rows or not np.array_equal(np.sort(order), np.arange(rows)):
            raise BatchError(
                f"reorder_data needs every original position 0..{rows - 1} once: got "
                f"{order.size} positions"
            )
        inverse = np.empty(rows, dtype=np.int64)
        inverse[order] = np.arange(rows)
        self.data = self._select(inverse)
        self._drop_plan()

    def truncate_tensors(
        self, dim: int, truncated_len: int, keys: Sequence[str] | None = None
    ) -> None:
        """Cut tensors that are longer in `dim` down to `truncated_len`, in place.

        Args:
            dim: A dimension other than that of the rows.
            truncated_len: The longest size to leave.
            keys: The columns to cut; all that have the dimension, if None.
        """
        if dim < 1 or truncated_len < 0:
            raise BatchError(
                "truncate_tensors needs a dimension of at least 1 (0 is the rows) and "
                f"a size of at least 0: got dim {dim}, size {truncated_len}"
            )
        for key in self.data if keys is None else keys:
            column = columns.column_of(self.data, key)
            if isinstance(column, torch.Tensor) and column.ndim > dim:
                self.data[key] = column.narrow(
                    dim, 0, min(truncated_len, column.shape[dim])
                )

    # ------------------------------------------------------------------------ sharding

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: None = None,
        sequence_packing_args: None = None,
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
    ) -> tuple[list[SlicedDataDict], list[int]]: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
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
        rows = self.size
        check_sizes(rows, shards, batch_size, allow_uneven_shards)
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise BatchError(
                "dynamic_batching_args and sequence_packing_args exclude each other"
            )
        args = dynamic_batching_args or sequence_packing_args
        if args is None:
            plan = plain_plan(rows, shards, batch_size, allow_uneven_shards)
            return self._apply(plan, None)
        width: int | None = None
        lengths, longest = sequence_lengths(self.data, args)
        if dynamic_batching_args is not None:
            width = longest
            plan = dynamic_plan(
                lengths, width, shards, batch_size, dynamic_batching_args
            )
        elif sequence_packing_args is not None:
            plan = packed_plan(lengths, shards, batch_size, sequence_packing_args)
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
                    if isinstance(column, torch.Tensor)
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

    # --------------------------------------------------------------------- construction

    def _select(self, rows: np.ndarray[Any, Any]) -> dict[str, Any]:
        index, listed = torch.from_numpy(rows), rows.tolist()
        return {
            key: columns.select_rows(column, listed, index)
            for key, column in self.data.items()
        }

    def _like(self, data: Mapping[str, Any], keep_plan: bool = False) -> Self:
        """An instance of the same class, with other columns."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.data = dict(data)
        if not keep_plan:
            made._drop_plan()
        return made

    def _sliced(self, items: Any) -> SlicedDataDict:
        made = SlicedDataDict()
        made.data = dict(items)
        return made

    def _drop_plan(self) -> None:
        for name in _PLAN:
            setattr(self, name, None)


class SlicedDataDict(BatchedDataDict[Any]):
    """A shard or a slice of a `BatchedDataDict`."""


def _rebuild(
    cls: type[BatchedDataDict[Any]], encoded: dict[str, Any], state: dict[str, Any]
) -> BatchedDataDict[Any]:
    made = cls.__new__(cls)
    made.__dict__.update(state)
    made.data = {key: decode(column) for key, column in encoded.items()}
    return made
