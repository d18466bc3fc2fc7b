"""`BatchedDataDict`: columns of equal length that can be sharded, packed and reordered.

A column is a tensor with the rows in dimension 0, or a list. numpy arrays are converted
when they are put in: numbers to a tensor that shares their memory, strings and objects
to a list. Anything else is refused. Where torch is not installed, numbers stay numpy
arrays, and everything here but `all_gather` and other devices works on them.

Sharding for dynamic batching or sequence packing leaves a micro-batch plan on each
shard. The plan refers to row positions: operations that keep the rows in place (`copy`,
`to`, `truncate_tensors`, pickling, setting a column) keep it, `get_batch` extracts the
part of one global batch, and all others drop it.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar, cast, overload

import numpy as np

from rl_distributed.batch import arrays, columns, micro_batches
from rl_distributed.batch.shard_plan import ShardPlan
from rl_distributed.batch.sharding import plan_shards
from rl_distributed.batch.size_checks import require_multiple, require_positive
from rl_distributed.batch.tensor_buffers import decode, encode, own_memory
from rl_distributed.batch.token_budget import DynamicBatchingArgs, SequencePackingArgs
from rl_distributed.errors import BatchError
from rl_distributed.extras import require_torch

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = [
    "AnyRows",
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "SequencePackingArgs",
    "SlicedDataDict",
]

DictT = TypeVar("DictT", covariant=True)


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """A dict of columns with the same number of rows.

    `BatchedDataDict[Points]`, with a `TypedDict` of the columns, says which ones a
    function needs. A type checker then knows the columns of `columns`, and takes rows
    with more of them as well; the type of `batch["name"]` it does not know. `AnyRows`
    is for functions that take any columns.

    Pickling moves tensors out of band (see `tensor_buffers`): values only, to the CPU.
    Tensors received through Ray lie in memory that all readers of the object share:
    a write in place changes what the others read. Call `writable` before writing.

    Columns may be set one after the other, as when all are cut to fewer rows; methods
    that need the number of rows raise while the columns differ.

    Raises:
        BatchError: The columns given differ in their number of rows, or one is neither
            a tensor nor a list nor an array.
    """

    micro_batch_indices: list[list[list[int]]] | None = None
    """Chunk, micro-batch: `[start, end]` rows, from 0 in each chunk."""
    micro_batch_lengths: list[list[int]] | None = None
    """Chunk, micro-batch: its padded (dynamic) or packed length in tokens."""
    elem_counts_per_gb: list[int] | None = None
    """Chunk: its number of rows; with sequence packing only."""
    padded_width: int | None = None
    """The width of the input column before truncation; dynamic batching only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._drop_plan()
        super().__init__(*args, **kwargs)
        # Evaluated only to check that all columns have the same length.
        _ = self.size

    def __setitem__(self, key: str, item: Any) -> None:
        super().__setitem__(key, columns.as_column(key, item))

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        # That of `UserDict` would put the columns in unseen.
        self.update(other)
        return self

    # ---------------------------------------------------------------- what it holds

    @property
    def size(self) -> int:
        """The number of rows; 0 without columns.

        Raises:
            BatchError: Columns differ in their number of rows.
        """
        sizes = {key: columns.num_rows(column) for key, column in self.data.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{key} has {size}" for key, size in sizes.items())
            raise BatchError(f"columns must have the same number of rows: {listed}")
        return next(iter(sizes.values()), 0)

    @property
    def columns(self) -> DictT:
        """The same columns, each with the type that the `TypedDict` gives it.

        For reading only: a column set here is not checked as `batch[name] = column` is.
        """
        return cast("DictT", self.data)

    def get_dict(self) -> dict[str, Any]:
        """Return the underlying dict."""
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
        """Return a shallow copy: the same columns and micro-batch plan."""
        return self._like(self.data, keep_plan=True)

    def clone(self) -> Self:
        """Return a copy whose tensors have memory of their own.

        Lists are copied shallowly.
        """
        cloned = {
            key: list(column) if isinstance(column, list) else arrays.clone(column)
            for key, column in self.data.items()
        }
        return self._like(cloned, keep_plan=True)

    def writable(self) -> Self:
        """Return this batch with a copy of each tensor whose memory is not its own.

        That is memory that torch did not allocate: Ray's object store, a numpy array, a
        file. Such tensors must not be written to in place, because torch has no
        read-only tensors and other readers would see it. Tensors inside lists and their
        views count as well; tensors in torch's own memory are not copied. Without torch
        the same holds for numpy arrays; those of Ray's object store refuse writes.
        """
        owned = {key: own_memory(column) for key, column in self.data.items()}
        return self._like(owned, keep_plan=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._like(copy.deepcopy(self.data, memo), keep_plan=True)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {key: value for key, value in self.__dict__.items() if key != "data"}
        for key, column in self.data.items():
            columns.require_values(f"column {key!r}", column)
        encoded = {key: encode(column) for key, column in self.data.items()}
        return _rebuild, (type(self), encoded, state)

    def to(self, device: torch.device | str | int) -> Self:
        """Move the tensors to a device, in place; returns self.

        Raises:
            BatchError: A tensor is on the meta device, and `device` is another one.
            MissingExtraError: Another device than `cpu` needs torch.
        """
        for key, column in self.data.items():
            if isinstance(column, list):
                continue
            if not str(device).startswith("meta"):
                columns.require_values(f"column {key!r}", column)
            self.data[key] = arrays.to_device(column, device)
        return self

    def all_gather(
        self,
        group: dist.ProcessGroup | None = None,
        pad_value_dict: Mapping[str, float | int] | None = None,
    ) -> Self:
        """Return the rows of all ranks of a process group, in rank order.

        Every rank must call it, and gets the same rows.

        Ranks may have different numbers of rows and widths; padding is as in
        `from_batches`.

        Raises:
            MissingExtraError: torch is not installed.
        """
        dist = require_torch("BatchedDataDict.all_gather").distributed
        # As objects, because ranks may differ in widths and numbers of rows.
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, self, group=group)
        devices = {
            key: column.device
            for key, column in self.data.items()
            if not isinstance(column, list)
        }
        result = self.from_batches(gathered, pad_value_dict)
        for key, device in devices.items():
            # Pickling moved all columns to the CPU.
            result.data[key] = result.data[key].to(device)
        return result

    # ------------------------------------------------------------------ rows in and out

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, float | int] | None = None,
    ) -> Self:
        """Concatenate the rows of all batches.

        Dimension 1 of tensors is right-padded to the widest batch, with the column's
        value in `pad_value_dict` or 0. Batches without columns are skipped.

        Raises:
            BatchError: A batch lacks a column of another, or a column differs in kind,
                dtype, device or in dimensions other than 0 and 1.
        """
        parts = []
        for batch in batches:
            if not batch:
                continue
            if not isinstance(batch, BatchedDataDict):
                batch = cls(batch)
            # Evaluated only to check that the columns of each batch have
            # the same length.
            _ = batch.size
            parts.append(batch)
        pads = pad_value_dict or {}
        result = cls()
        # Sorted, because the order of a set of strings differs between processes.
        for key in sorted({key for part in parts for key in part}, key=str):
            found = [part.data[key] for part in parts if key in part.data]
            if len(found) < len(parts):
                missing = [
                    place
                    for place, batch in enumerate(batches)
                    if len(batch) and key not in batch
                ]
                raise BatchError(
                    f"column {key!r} is missing in batches {missing} of {len(batches)}"
                )
            result.data[key] = columns.concat_columns(key, found, pads.get(key, 0))
        return result

    def slice(self, start: int, end: int) -> SlicedDataDict[DictT]:
        """Return rows `[start, end)`; tensors are views.

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

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict[DictT]:
        """Return part `rank` of `chunks` equal contiguous parts; tensors are copies.

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
        """Return the given rows in the given order; with booleans, those that are true.

        Raises:
            BatchError: An index lies outside the rows, or is no integer.
        """
        rows = columns.row_indices(indices, self.size)
        return self._like(self._select(rows))

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Repeat each row `num_repeats` times; list items are independent copies.

        The copies of a row are neighbours.
        """
        require_positive("num_repeats", num_repeats)
        # Evaluated only to check that all columns have the same length.
        _ = self.size
        return self._like(
            {
                key: columns.repeat_column(column, num_repeats)
                for key, column in self.data.items()
            }
        )

    def reorder_data(self, reorded_indices: Sequence[int]) -> None:
        """Restore the original order of the rows, in place.

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
        # Positions say where rows came from; a selection needs where they go.
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
            truncated_len: The size to cut to.
            keys: The columns to cut; None: all that have the dimension.
        """
        if dim < 1 or truncated_len < 0:
            raise BatchError(
                "truncate_tensors needs a dimension of at least 1 (0 is the rows) and "
                f"a size of at least 0: got dim {dim}, size {truncated_len}"
            )
        for key in self.data if keys is None else keys:
            column = columns.column_of(self.data, key)
            if not isinstance(column, list) and column.ndim > dim:
                self.data[key] = arrays.narrow(column, dim, truncated_len)

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
    ) -> list[SlicedDataDict[DictT]]: ...

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
    ) -> tuple[list[SlicedDataDict[DictT]], list[int]]: ...

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
    ) -> tuple[list[SlicedDataDict[DictT]], list[int]]: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
        rows_per_group: int = 1,
    ) -> list[SlicedDataDict[DictT]] | tuple[list[SlicedDataDict[DictT]], list[int]]:
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
            rows_per_group: Number of consecutive rows kept together and in order,
                in one shard and one micro-batch.

        Returns:
            The shards. With dynamic batching or sequence packing also, for each row of
            the concatenated shards, its original position: after
            `result = BatchedDataDict.from_batches(shards)`,
            `result.reorder_data(positions)` restores the order.

        Raises:
            BatchError: Sizes do not divide, arguments exclude each other, a column is
                missing, or (as `PackingError`) a row fits in no micro-batch.
        """
        plan, width = plan_shards(
            self.data,
            self.size,
            shards,
            batch_size=batch_size,
            allow_uneven_shards=allow_uneven_shards,
            dynamic_batching_args=dynamic_batching_args,
            sequence_packing_args=sequence_packing_args,
            rows_per_group=rows_per_group,
        )
        parts = self._apply(plan, width)
        if dynamic_batching_args is None and sequence_packing_args is None:
            return parts
        return parts, plan.order

    def _apply(self, plan: ShardPlan, width: int | None) -> list[SlicedDataDict[DictT]]:
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
    ) -> SlicedDataDict[DictT]:
        """Return the rows of one global batch on this shard, with its micro-batch plan.

        Args:
            batch_idx: The number of the global batch.
            batch_size: Its rows on this shard; not needed after sequence packing,
                where global batches differ.

        Raises:
            BatchError: There is no such global batch.
        """
        return micro_batches.global_batch(self, batch_idx, batch_size)

    def make_microbatch_iterator(
        self, microbatch_size: int
    ) -> Iterator[SlicedDataDict[DictT]]:
        """Return slices of `microbatch_size` rows.

        Raises:
            BatchError: The rows are no multiple of it.
        """
        return micro_batches.fixed_size(self, microbatch_size)

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1
    ) -> Iterator[SlicedDataDict[DictT]]:
        """Return the micro-batches of dynamic batching, each cut to its padded length.

        Tensors as wide as the input column was at sharding are cut in `sequence_dim`.
        """
        return micro_batches.dynamic_shapes(self, sequence_dim)

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the number of micro-batches of dynamic batching."""
        return len(micro_batches.single_plan(self, "dynamic batching")[0])

    def make_microbatch_iterator_for_packable_sequences(
        self,
    ) -> Iterator[SlicedDataDict[DictT]]:
        """Return the rows of each bin of sequence packing, still padded.

        Joining them into one packed row is left to the caller.
        """
        return micro_batches.packed_bins(self)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return the number of bins, and the tokens of the fullest."""
        bounds, lengths = micro_batches.single_plan(self, "sequence packing")
        return len(bounds), max(lengths, default=0)

    # --------------------------------------------------------------------- construction

    def _select(self, rows: np.ndarray[Any, Any]) -> dict[str, Any]:
        listed = rows.tolist()
        return {
            key: columns.select_rows(column, listed, rows)
            for key, column in self.data.items()
        }

    def _like(self, data: Mapping[str, Any], keep_plan: bool = False) -> Self:
        """Return an instance of the same class, with other columns."""
        # Bypasses the constructor, which would check every column again.
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.data = dict(data)
        if not keep_plan:
            made._drop_plan()
        return made

    def _drop_plan(self) -> None:
        for name in micro_batches.PLAN_FIELDS:
            setattr(self, name, None)

    def _sliced(self, items: Iterable[tuple[str, Any]]) -> SlicedDataDict[DictT]:
        made: SlicedDataDict[DictT] = SlicedDataDict()
        made.data = dict(items)
        return made


class SlicedDataDict(BatchedDataDict[DictT]):
    """A shard or a slice of a `BatchedDataDict`."""


AnyRows: TypeAlias = BatchedDataDict[object]
"""Rows with any columns, as where they are only passed on."""


def _rebuild(
    cls: type[AnyRows], encoded: dict[str, Any], state: dict[str, Any]
) -> AnyRows:
    made = cls.__new__(cls)
    made.__dict__.update(state)
    made.data = {key: decode(column) for key, column in encoded.items()}
    return made
