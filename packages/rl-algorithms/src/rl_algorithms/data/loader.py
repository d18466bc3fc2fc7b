"""`BatchedDataLoader`: batches in a reproducible order, resumable to the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.pass_rate_filter import DATA_ROW, PassRateFilter
from rl_algorithms.errors import DataError, EmptyDatasetError
from rl_algorithms.seeds import permutation
from rl_distributed.batch.batched_data_dict import (
    AnyRows,
    BatchedDataDict,
)
from rl_distributed.logs.logging import get_logger

__all__ = ["BatchedDataLoader", "RowOrder", "SinglePassLoader"]

_logger = get_logger(__name__)

Batch = Any
"""Type of the batches that `collate_fn` returns; a `BatchedDataDict` by default."""


_DEFAULT_ROWS = 32


def _default_collate(rows: Sequence[Mapping[str, Any]]) -> AnyRows:
    """Collate processed prompts into token columns, other rows into plain lists."""
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                "a row must be a mapping of columns: got "
                f"{type(row).__name__} {row!r:.60} (row {index} of the batch); give "
                "collate_fn, which makes a batch of rows of another kind"
            )
    # Rows of `process_prompts` have both, and other rows hardly have them by chance.
    if all("token_ids" in row and "message_log" in row for row in rows):
        return rl_collate_fn(rows)  # type: ignore[arg-type]
    names = list(rows[0])
    for index, row in enumerate(rows):
        if set(row) != set(names):
            raise DataError(
                "rows of a batch must have the same columns: got "
                f"{', '.join(map(repr, row))} beside {', '.join(map(repr, names))} "
                f"(row {index} of the batch and the first)"
            )
    return BatchedDataDict({name: [row[name] for row in rows] for name in names})


class Loader(Protocol):
    """Batches of a dataset, for training and for validation."""

    def __iter__(self) -> Iterator[AnyRows]:
        """Continue the current epoch, or begin the next one."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position in the data as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position saved by `state_dict`."""
        ...


@runtime_checkable
class SinglePassLoader(Loader, Protocol):
    """A loader whose data may be gone after a pass, as those of an iterator."""

    @property
    def is_used_up(self) -> bool:
        """Whether no further pass is possible."""
        ...


class RowOrder(Protocol):
    """An order of rows other than one permutation of them."""

    def __len__(self) -> int:
        """Return the rows of an epoch."""
        ...

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return the rows of an epoch in order."""
        ...

    def state(self) -> Any:
        """Return the settings that determine the order, as JSON values."""
        ...


def _check_sizes(batch_size: int, num_shards: int, shard_index: int) -> None:
    # bool is a subclass of int, and True would be a batch of one row.
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise DataError(f"batch_size must be a whole number: got {batch_size!r}")
    if batch_size < 1:
        raise DataError(f"batch_size must be at least 1: got {batch_size}")
    if not 0 <= shard_index < num_shards:
        raise DataError(
            "shard_index must be from 0 to num_shards - 1: got "
            f"{shard_index} with num_shards={num_shards}"
        )
    if batch_size % num_shards:
        raise DataError(
            "batch_size must be a multiple of num_shards: got "
            f"{batch_size} with {num_shards} shards; use "
            f"{batch_size + num_shards - batch_size % num_shards}"
        )


class BatchedDataLoader:
    """Iterates over a dataset in batches.

    The order is a pure function of seed and epoch. `iter()` continues at the current
    position and ends with the epoch; the next `iter()` begins the next epoch. With
    `endless=True` it never ends, and batches span epochs.

    Args:
        dataset: Anything with `len()` and integer indices, or an iterable of rows.
        batch_size: Rows per batch; None: 32, or all where there are fewer.
        shuffle: Permute the rows of each epoch.
        seed: Seed of the permutation.
        drop_last: Drop the last, smaller batch of an epoch.
        endless: Fill batches across epochs and never stop.
        collate_fn: Function that makes a batch of a list of rows.
        order: The order of the rows of an epoch, such as a `MixtureOrder`, in place of
            `shuffle`.
        num_shards: Number of processes that share each batch; `batch_size` counts the
            rows of all of them.
        shard_index: Index of the part of each batch that this loader returns.
        pass_rates: Filter that skips rows of an epoch; batches then have a column
            `data_row`, and an epoch may be shorter than `len()`.
        name: Name of the dataset in messages.

    Raises:
        EmptyDatasetError: There is no row, or no full batch with `drop_last`.
        DataError: The batch size or the shard is invalid, or `pass_rates` is combined
            with several shards or `endless`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        endless: bool = False,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
        order: RowOrder | None = None,
        num_shards: int = 1,
        shard_index: int = 0,
        pass_rates: PassRateFilter | None = None,
        name: str | None = None,
    ) -> None:
        rows = (
            dataset
            # Not copied if it can be indexed, since a Hugging Face dataset reads rows
            # when used.
            if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
            else list(dataset)
        )
        self.name = name or str(getattr(dataset, "name", None) or "dataset")
        if batch_size is None:
            # Rounded to a multiple of the shards, with at least one row each.
            shards = max(num_shards, 1)
            batch_size = max(min(_DEFAULT_ROWS, len(rows)) // shards, 1) * shards
        _check_sizes(batch_size, num_shards, shard_index)
        if num_shards > 1 and not (drop_last or endless):
            raise DataError(
                f"{self.name}: num_shards={num_shards} needs drop_last or endless, so "
                "that every shard gets rows of every batch"
            )
        if pass_rates is not None and (num_shards > 1 or endless):
            raise DataError(
                f"{self.name}: pass_rates settles the rows of one epoch after the "
                f"other, in one process: got num_shards={num_shards}, "
                f"endless={endless}; leave them out"
            )
        if len(rows) == 0:
            raise EmptyDatasetError(f"{self.name} has no rows: nothing to iterate over")
        if drop_last and not endless and len(rows) < batch_size:
            raise EmptyDatasetError(
                f"{self.name} has {len(rows)} rows but a batch takes {batch_size} and "
                "drop_last is set: lower the batch size (num_prompts_per_step, "
                "train_global_batch_size), add rows, or set drop_last to false"
            )
        self._rows = rows
        self._batch_size = batch_size
        self._shuffle, self._seed = shuffle, seed
        self._drop_last, self._endless = drop_last, endless
        self._collate = collate_fn if collate_fn is not None else _default_collate
        self._row_order = order
        self._pass_rates = pass_rates
        self.fingerprint: str | None = None
        """Fingerprint of the rows, saved with the position; a resume with another one
        warns. None: unknown."""
        self._shard = slice(shard_index, None, num_shards)
        self._epoch, self._position = 0, 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def batch_size(self) -> int:
        """Rows per batch, over all shards."""
        return self._batch_size

    @property
    def num_rows(self) -> int:
        """Rows per epoch, including those that `pass_rates` skips."""
        return len(self._rows if self._row_order is None else self._row_order)

    @property
    def epoch(self) -> int:
        """Epoch of the next row, counted from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Number of rows of this epoch already returned."""
        return self._position

    def __len__(self) -> int:
        """Return the batches of one whole epoch."""
        if self._drop_last:
            return self.num_rows // self._batch_size
        return -(-self.num_rows // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        if self._endless:
            while True:
                yield self._batch(self._take_endless())
        while self._left() >= (self._batch_size if self._drop_last else 1):
            start = self._position
            self._position = min(start + self._batch_size, self._num_rows_now())
            indices = self._indices(self._epoch)[start : self._position]
            # Advanced before the yield, so that a state saved while this batch is in
            # use resumes after it.
            yield self._batch(indices)
        self._epoch, self._position = self._epoch + 1, 0

    def _batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Batch:
        batch = self._collate([self._rows[int(i)] for i in indices[self._shard]])
        if self._pass_rates is not None:
            batch[DATA_ROW] = [int(i) for i in indices]
        return batch

    def _left(self) -> int:
        return self._num_rows_now() - self._position

    def _num_rows_now(self) -> int:
        """Return the rows of the current epoch."""
        if self._pass_rates is None:
            return self.num_rows
        return len(self._indices(self._epoch))

    def batch_at(self, epoch: int, places: Sequence[int]) -> Batch:
        """Return the rows at the given places in the order of an epoch.

        Safe to call from another thread; does not move the loader.

        Args:
            epoch: Counted from 0.
            places: From 0 to `num_rows` - 1.

        Raises:
            DataError: With `pass_rates` the order of a later epoch is not known yet.
        """
        if self._pass_rates is not None:
            raise DataError(
                f"{self.name}: pass_rates settles which rows an epoch has when it "
                "begins, so batch_at cannot look ahead; iterate, or leave it out"
            )
        indices = self._indices(epoch)
        return self._collate([self._rows[int(indices[place])] for place in places])

    @property
    def drops_last(self) -> bool:
        """Whether the last rows of an epoch are dropped if they do not fill a batch."""
        return self._drop_last

    def _indices(self, epoch: int) -> NDArray[np.int64]:
        found = self._order
        if found is None or found[0] != epoch:
            order = (
                self._row_order.indices(epoch)
                if self._row_order is not None
                else permutation(self.num_rows, seed=self._seed, epoch=epoch)
                if self._shuffle
                else np.arange(self.num_rows, dtype=np.int64)
            )
            if self._pass_rates is not None:
                order = self._pass_rates.kept(epoch, order, self._batch_size)
            # Two threads may be in different epochs, so each keeps a local reference.
            self._order = found = (epoch, order)
        return found[1]

    def _take_endless(self) -> list[int]:
        """Take the next rows, from the following epochs too if this one runs out."""
        taken: list[int] = []
        while len(taken) < self._batch_size:
            start = self._position
            end = min(start + self._batch_size - len(taken), self.num_rows)
            taken += self._indices(self._epoch)[start:end].tolist()
            self._position = end
            if end == self.num_rows:
                self._epoch, self._position = self._epoch + 1, 0
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader as plain numbers.

        It is the same on all shards and can be restored with another number of them.
        """
        state: dict[str, Any] = {
            "epoch": self._epoch,
            "position": self._position,
            "num_rows": self.num_rows,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }
        if self._row_order is not None:
            state["mixture"] = self._row_order.state()
        if self._pass_rates is not None:
            state["pass_rate_filter"] = self._pass_rates.state_dict()
        if self.fingerprint is not None:
            state["fingerprint"] = self.fingerprint
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position; the batch size may differ.

        Raises:
            DataError: The state is from another dataset, seed or order.
        """
        missing = {"epoch", "position", "num_rows", "seed", "shuffle"} - set(state)
        if missing:
            raise DataError(
                f"loader state of {self.name} lacks {', '.join(sorted(missing))}: it "
                "was not saved by BatchedDataLoader.state_dict()"
            )
        mine = self.state_dict()
        for key in ("num_rows", "seed", "shuffle", "mixture"):
            if state.get(key) != mine.get(key):
                raise DataError(
                    f"cannot resume {self.name}: its {key} was {state.get(key)} when "
                    f"the state was saved and is {mine.get(key)} now; use the same "
                    "data and settings, or start a new run"
                )
        if ("pass_rate_filter" in state) != (self._pass_rates is not None):
            was, now = ("on", "off") if "pass_rate_filter" in state else ("off", "on")
            raise DataError(
                f"cannot resume {self.name}: data.pass_rate_filter was {was} when the "
                f"state was saved and is {now} now; use the same settings, or start a "
                "new run"
            )
        saved = state.get("fingerprint")
        # No error: a corrected answer leaves every row at its place.
        if None not in (saved, self.fingerprint) and saved != self.fingerprint:
            _logger.warning(
                "%s has other rows than when the checkpoint was saved (fingerprint %s, "
                "then %s): the run goes on with the new ones at the same place; start "
                "a new run if they are not meant to change",
                self.name,
                self.fingerprint,
                saved,
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= self.num_rows:
            raise DataError(
                f"cannot resume {self.name}: epoch {epoch}, row {position} of "
                f"{self.num_rows} is no place in it"
            )
        if self._pass_rates is not None:
            # Its records decide which rows an epoch has, so the cached order is no
            # longer valid.
            self._pass_rates.load_state_dict(state["pass_rate_filter"])
            self._order = None
        self._epoch, self._position = epoch, position
