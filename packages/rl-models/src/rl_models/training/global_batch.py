"""Global batches of a shard and their micro-batches.

```
shard -- global_batches --> batch -- micro_batches --> rows and width of each
                                  -- part_of --------> its rows and columns
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.batch.micro_batches import MicroBatch, bounds, cut
from rl_models.types import (
    InputRows,
    TokenDatumSpec,
)

__all__ = [
    "global_batches",
    "micro_batches",
    "num_trained",
    "on_device",
    "part_of",
]

T = TypeVar("T")
RowsT = TypeVar("RowsT", bound=TokenDatumSpec)


def global_batches(
    data: BatchedDataDict[T], rows_per_batch: int
) -> Iterator[BatchedDataDict[T]]:
    """Yield the global batches of a shard, each with its own micro-batch plan."""
    plan = data.micro_batch_indices
    count = len(plan) if plan else data.size // rows_per_batch
    if count == 1:
        # Without a copy, the usual case.
        yield data
        return
    for index in range(count):
        yield data.get_batch(index, rows_per_batch)


def micro_batches(batch: InputRows, micro_batch_size: int) -> list[MicroBatch]:
    """Return the micro-batches of one global batch, each as wide as its longest row.

    Args:
        batch: Rows. A plan made by `shard_by_batch_size` (dynamic batching or packing)
            is followed; it has the same number of micro-batches on every rank.
        micro_batch_size: Rows per micro-batch if there is no plan.
    """
    lengths = batch.columns["input_lengths"].numpy()
    return [
        # At least two columns: log-probs have one fewer than tokens, and none would be
        # empty.
        MicroBatch(start, stop, max(int(lengths[start:stop].max(initial=0)), 2))
        for start, stop in bounds(batch, micro_batch_size)
    ]


def part_of(batch: BatchedDataDict[RowsT], part: MicroBatch) -> BatchedDataDict[RowsT]:
    """Return a micro-batch as views: its rows and width of [B, S, ...] columns."""
    return cut(batch, part, batch.columns["input_ids"].shape[1])


def num_trained(batch: Mapping[str, Any]) -> Tensor:
    """Return the numbers of trained rows and of trained tokens, by their weights.

    Needed before the first pass: each micro-batch divides its loss by the counts of the
    whole batch, so that gradients can simply be added, however rows are cut.
    """
    # In float64: float32 counts exactly to 16.7 million only.
    rows = batch["sample_mask"].double()
    # The first token of a row has no log-prob, whatever the mask says.
    tokens = batch["token_mask"][:, 1:].double().sum(1) * rows
    return torch.stack([rows.sum(), tokens.sum()])


def on_device(part: BatchedDataDict[T], device: torch.device) -> BatchedDataDict[T]:
    """Return a micro-batch on the model's device."""
    return part if device.type == "cpu" else part.to(device)
