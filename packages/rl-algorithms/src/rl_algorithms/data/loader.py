"""`BatchedDataLoader`: batches in an order that can be resumed to the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.errors import DataError, EmptyDatasetError
from rl_algorithms.seeds import permutation
from rl_distributed.batched_data_dict import BatchedDataDict

__all__ = ["BatchedDataLoader"]

Batch = Any
"""What `collate_fn` returns; a `BatchedDataDict` by default."""


def _default_collate(rows: Sequence[Mapping[str, Any]]) -> BatchedDataDict[Any]:
    """Processed prompts become token columns, other rows plain lists by column."""
    if all("token_ids" in row and "message_log" in row for row in rows):
        return rl_collate_fn(rows)  # type: ignore[arg-type]
    names = list(rows[0])
    return BatchedDataDict({name: [row[name] for row in rows] for name in names})


class BatchedDataLoader:
    """Iterates over a dataset in batches.

    The order is a pure function of seed and epoch. `iter()` goes on where the loader
    stands and ends with the epoch; the next `iter()` begins the next epoch. With
    `endless=True` it never ends, and batches run across epochs.

    Args:
        dataset: Anything with `len()` and integer indices, or an iterable of rows.
        batch_size: Rows per batch.
        shuffle: Permute the rows of each epoch.
        seed: Seed of the permutation.
        drop_last: Leave out the last, smaller batch of an epoch.
        endless: Fill batches across epochs and never stop.
        collate_fn: Turns a list of rows into a batch.
        name: What to call the dataset in messages.

    Raises:
        EmptyDatasetError: There is no row, or no full batch with `drop_last`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        endless: bool = False,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
        name: str | None = None,
    ) -> None:
        rows = (
            dataset
            if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
            else list(dataset)
        )
        self.name = name or str(getattr(dataset, "name", None) or "dataset")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int):
            raise DataError(f"batch_size must be a whole number: got {batch_size!r}")
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1: got {batch_size}")
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
        self._epoch, self._position = 0, 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def batch_size(self) -> int:
        """Rows per batch."""
        return self._batch_size

    @property
    def num_rows(self) -> int:
        """Rows per epoch."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """Epoch of the next row, counted from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Rows of this epoch that have been handed out."""
        return self._position

    def __len__(self) -> int:
        """Return the batches of one whole epoch."""
        if self._drop_last:
            return self.num_rows // self._batch_size
        return -(-self.num_rows // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        if self._endless:
            while True:
                yield self._collate([self._rows[i] for i in self._take_endless()])
        while self._left() >= (self._batch_size if self._drop_last else 1):
            start = self._position
            self._position = min(start + self._batch_size, self.num_rows)
            indices = self._indices(self._epoch)[start : self._position]
            # The position is moved first, so that a state saved while this batch is in
            # use resumes after it.
            yield self._collate([self._rows[int(i)] for i in indices])
        self._epoch, self._position = self._epoch + 1, 0

    def _left(self) -> int:
        return self.num_rows - self._position

    def _indices(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            order = (
                permutation(self.num_rows, seed=self._seed, epoch=epoch)
                if self._shuffle
                else np.arange(self.num_rows, dtype=np.int64)
            )
            self._order = (epoch, order)
        return self._order[1]

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

    def state_dict(self) -> dict[str, int | bool]:
        """Return where the loader stands: plain numbers."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_rows": self.num_rows,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved; the batch size may differ.

        Raises:
            DataError: The state is of another dataset, seed or order.
        """
        missing = {"epoch", "position", "num_rows", "seed", "shuffle"} - set(state)
        if missing:
            raise DataError(
                f"loader state of {self.name} lacks {', '.join(sorted(missing))}: it "
                "was not saved by BatchedDataLoader.state_dict()"
            )
        mine = self.state_dict()
        for key in ("num_rows", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise DataError(
                    f"cannot resume {self.name}: its {key} was {state[key]} when the "
                    f"state was saved and is {mine[key]} now; use the same data and "
                    "settings, or start a new run"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= self.num_rows:
            raise DataError(
                f"cannot resume {self.name}: epoch {epoch}, row {position} of "
                f"{self.num_rows} is no place in it"
            )
        self._epoch, self._position = epoch, position
