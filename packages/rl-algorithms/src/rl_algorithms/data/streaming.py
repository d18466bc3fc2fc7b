"""Stream rows during training: endless sources, or more rows than fit in memory.

```
source --rows--> block of n rows --process, shuffle--> batches
```
The stream is read in blocks; a block is processed and shuffled as a whole, by the seed,
the epoch and its number. A saved state is therefore a position: the number of rows
before the block, and the number of its rows already returned. To resume, the rows
before the block are skipped and the block is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from rl_algorithms.data.config import SourceConfig
from rl_algorithms.data.readers import read_file
from rl_algorithms.data.sources import Files, as_row, describe_source, locate, shape_row
from rl_algorithms.data.types import DatumSpec, Row
from rl_algorithms.errors import DataError, EmptyDatasetError
from rl_algorithms.seeds import mix, permutation

__all__ = ["RowStream", "StreamLoader"]

Process = Callable[[list[Row], str], Any]
"""Function of raw rows and their name in messages that returns a `ProcessedDataset`."""


class RowStream:
    """A source that is reopened for each pass over the data.

    Args:
        source: A file, folder or hub name; an iterable; or a function that returns one,
            such as a generator function.
        config: Split, subset and columns; its path if `source` is not given.

    Raises:
        DataError: The source is none of these.
    """

    def __init__(self, source: Any, config: SourceConfig | None = None) -> None:
        self._config = config if config is not None else SourceConfig()
        source = source if source is not None else self._config.path
        self.name = describe_source(source)
        self._source = source
        if isinstance(source, str | Path):
            split, subset = self._config.split, self._config.subset
            self._source = locate(str(source), split, subset, streaming=True)
        elif not callable(source) and not isinstance(source, Iterable):
            raise DataError(
                "data.streaming needs a file, a folder, a hub name, an iterable or a "
                f"function that returns one: got {type(source).__name__}"
            )
        self._opened = False

    def rows(self, skip: int = 0) -> Iterator[Row]:
        """Iterate over the source from its start, skipping the first rows.

        Raises:
            DataError: The source is an iterator that is already consumed.
        """
        index = skip
        for row in self._open(skip):
            row = as_row(row, index, self.name)
            # `or row`: the configuration rejects formats that drop rows.
            yield shape_row(row, index, self._config) or row
            index += 1

    @property
    def once(self) -> bool:
        """Whether the source is an iterator, which can be consumed only once."""
        return isinstance(self._source, Iterator)

    def _open(self, skip: int) -> Iterator[Any]:
        source = self._source
        if isinstance(source, Files):
            rows: Any = chain.from_iterable(read_file(file) for file in source)
        elif callable(source):
            rows = source()
        elif self.once and self._opened:
            raise DataError(
                f"dataset {self.name} can be gone through only once, and another pass "
                "was asked for: give the function that creates it"
            )
        else:
            rows = source
        self._opened = True
        if skip and hasattr(rows, "skip"):
            return iter(rows.skip(skip))  # a Hugging Face dataset need not read them
        return islice(iter(rows), skip, None)


class StreamLoader:
    """Batches of a stream, without a length and resumable to the sample.

    Args:
        stream: The rows.
        batch_size: Rows per batch.
        process: Function that tokenises rows.
        block_rows: Number of rows processed and shuffled together.
        shuffle: Whether to shuffle each block.
        seed: Seed of the order.
        drop_last: Drop the last, smaller batch of a pass.
        collate_fn: Function that makes a batch of a list of processed rows.

    Raises:
        EmptyDatasetError: The stream has no rows.
        DataError: The first block cannot be processed.
    """

    def __init__(
        self,
        stream: RowStream,
        batch_size: int,
        *,
        process: Process,
        block_rows: int = 1000,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] = list,
    ) -> None:
        self._stream, self._batch_size = stream, batch_size
        self._process, self._collate = process, collate_fn
        self._block_rows = max(block_rows, batch_size)
        self._shuffle, self._seed = shuffle, seed
        self._drop_last = drop_last
        self._epoch, self._before, self._taken = 0, 0, 0
        # The first rows are read now, so that errors appear before a model is loaded,
        # and kept, because an iterator yields them only once.
        self._rest = stream.rows()
        self._first = list(islice(self._rest, self._block_rows))
        if not self._first:
            raise EmptyDatasetError(f"dataset {stream.name} is empty: it has no rows")
        self.first_block = process(self._first, stream.name)

    @property
    def batch_size(self) -> int:
        """Rows per batch."""
        return self._batch_size

    @property
    def is_used_up(self) -> bool:
        """Whether no further pass is possible, because an iterator is exhausted."""
        return self._stream.once and self._epoch > 0

    def __iter__(self) -> Iterator[Any]:
        left: list[tuple[int, int, DatumSpec]] = []
        # A resumed pass has given batches before, so it may end without another.
        is_empty = self._before == self._taken == 0
        for before, block in self._blocks():
            # Only the first block after a resume is partly used.
            start = self._taken if before == self._before else 0
            left += [(before, n + 1, row) for n, row in enumerate(block)][start:]
            while len(left) >= self._batch_size:
                batch, left = left[: self._batch_size], left[self._batch_size :]
                # Advanced before the yield, as in `BatchedDataLoader`.
                self._before, self._taken, _ = batch[-1]
                is_empty = False
                yield self._collate([row for _, _, row in batch])
        if left and not self._drop_last:
            self._before, self._taken, _ = left[-1]
            yield self._collate([row for _, _, row in left])
        elif is_empty:
            # Otherwise passes would repeat forever without a single step.
            raise DataError(
                f"dataset {self._stream.name} ended after {len(left)} usable rows, "
                f"less than a step takes ({self._batch_size}): give it more rows, take "
                "fewer per step, or set data.drop_last=false"
            )
        self._epoch, self._before, self._taken = self._epoch + 1, 0, 0

    def _blocks(self) -> Iterator[tuple[int, list[DatumSpec]]]:
        """Yield the blocks from the current position on, with the rows before each."""
        before = self._before
        rows: Iterator[Row]
        # An iterator cannot be reopened, so a resumed run also reads on from the first
        # block; other sources may be able to skip rows without reading them.
        if self._epoch == 0 and self._first and (before == 0 or self._stream.once):
            rows = islice(chain(self._first, self._rest), before, None)
            self._first = []
        else:
            rows = self._stream.rows(before)
        while block := list(islice(rows, self._block_rows)):
            yield before, self._processed(block, before)
            before += len(block)

    def _processed(self, block: list[Row], before: int) -> list[DatumSpec]:
        name = self._stream.name + (f" from row {before} on" if before else "")
        try:
            data = list(self._process(block, name))
        except EmptyDatasetError:
            return []  # all of them are too long, which has been said
        if not self._shuffle:
            return data
        seed = int(mix(self._seed, before) >> np.uint64(1))
        order = permutation(len(data), seed=seed, epoch=self._epoch)
        return [data[int(index)] for index in order]

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position of the loader as plain numbers."""
        return {
            "epoch": self._epoch,
            "rows_before_block": self._before,
            "taken_of_block": self._taken,
            "block_rows": self._block_rows,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position.

        Raises:
            DataError: The state is from another loader, seed or order.
        """
        mine = self.state_dict()
        missing = set(mine) - set(state)
        if missing:
            raise DataError(
                f"loader state of {self._stream.name} lacks "
                f"{', '.join(sorted(missing))}: it was not saved by a stream"
            )
        for key in ("block_rows", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise DataError(
                    f"cannot resume {self._stream.name}: its {key} was {state[key]} "
                    f"when the state was saved and is {mine[key]} now; use the same "
                    "settings, or start a new run"
                )
        self._epoch = int(state["epoch"])
        self._before = int(state["rows_before_block"])
        self._taken = int(state["taken_of_block"])
