"""Spread work evenly: pure functions of costs."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_distributed.errors import BatchError

__all__ = [
    "bin_loads",
    "deal_in_rounds",
    "even_bounds",
    "load_imbalance",
    "lpt_partition",
    "split_heaviest",
]


def even_bounds(total: int, parts: int) -> list[tuple[int, int]]:
    """`[start, end)` of `parts` contiguous parts of `ceil(total / parts)` items.

    Trailing parts are smaller and can be empty: 5 items in 4 parts are 2, 2, 1, 0.
    """
    size = -(-total // parts)
    return [
        (min(part * size, total), min((part + 1) * size, total))
        for part in range(parts)
    ]


def bin_loads(
    bins: Sequence[Sequence[int]], costs: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the total cost of the items in each bin; no bin may be empty."""
    sizes = np.fromiter(map(len, bins), dtype=np.int64, count=len(bins))
    if not sizes.size:
        return sizes
    items = np.fromiter(itertools.chain.from_iterable(bins), np.int64, sizes.sum())
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    # For an empty bin, `reduceat` would return the first item of the next one.
    loads: NDArray[np.int64] = np.add.reduceat(costs[items], starts)
    return loads


def load_imbalance(loads: ArrayLike) -> float:
    """By how much the heaviest load exceeds the mean: 0.0 is perfect balance."""
    array = np.asarray(loads, dtype=np.float64)
    mean = float(array.mean()) if array.size else 0.0
    return float(array.max()) / mean - 1.0 if mean > 0 else 0.0


def deal_in_rounds(
    costs: ArrayLike, num_shards: int, earlier_loads: Sequence[int] | None = None
) -> list[list[int]]:
    """Deal items to shards, one each per round, so that loads stay close.

    Items are sorted by cost and cut into rounds of `num_shards` neighbours. In each
    round the heaviest item goes to the shard with the least load. So all shards get
    the same number of items, items of one round cost about the same (shards that work
    in lockstep wait little for each other), and total loads even out.

    Args:
        costs: The cost of each item, `[N]`. Where N is no multiple of `num_shards`,
            the round of the cheapest items is the short one.
        num_shards: The number of shards.
        earlier_loads: Load that each shard got before; decides between equal loads.

    Returns:
        For each round, from the cheapest to the dearest, the item of each shard; -1
        where a shard has none.
    """
    if num_shards < 1:
        raise BatchError(f"the number of shards must be positive: got {num_shards}")
    array = np.asarray(costs)
    # Stable, so that ties are dealt the same way on every machine.
    order: list[int] = np.argsort(array, kind="stable").tolist()
    values: list[int] = array[order].tolist()
    loads = [(0, earlier) for earlier in earlier_loads or [0] * num_shards]
    dealt: list[list[int]] = []
    first = len(order) % num_shards
    bounds = range(first, len(order), num_shards)
    starts = [(0, first), *((start, start + num_shards) for start in bounds)]
    # The dearest round first: later, cheaper rounds can only correct what it left.
    for start, end in reversed(starts):
        # If the items divide evenly, there is no short round.
        if start == end:
            continue
        by_load = sorted(range(num_shards), key=loads.__getitem__)
        row = [-1] * num_shards
        for place, shard in zip(range(end - 1, start - 1, -1), by_load, strict=False):
            row[shard] = order[place]
            loads[shard] = (loads[shard][0] + values[place], loads[shard][1])
        dealt.append(row)
    dealt.reverse()
    return dealt


def lpt_partition(
    costs: Sequence[int], num_parts: int, capacity: int | None = None
) -> list[list[int]] | None:
    """Items in `num_parts` parts of about equal cost, the dearest item first.

    Each item goes to the part with the least cost so far (longest processing time
    first). Parts can differ in their number of items. The result is None where an item
    would take its part above `capacity`.
    """
    if num_parts < 1:
        raise BatchError(f"the number of parts must be positive: got {num_parts}")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, part) for part in range(num_parts)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, part = heap[0]
        load += costs[item]
        if capacity is not None and load > capacity:
            return None
        heapq.heapreplace(heap, (load, part))
        parts[part].append(item)
    return parts


def split_heaviest(
    bins: Sequence[Sequence[int]],
    costs: NDArray[np.int64],
    num_bins: int,
    contiguous: bool = False,
) -> list[list[int]]:
    """Split bins in two, always the heaviest with more than one item, up to `num_bins`.

    With `contiguous`, a bin is cut into its first and its last items, as evenly as
    that allows; otherwise its items are dealt to the halves.

    Raises:
        BatchError: There are fewer items than `num_bins`.
    """
    result = [list(items) for items in bins]
    heap = [
        (-load, place)
        for place, load in enumerate(bin_loads(bins, costs).tolist())
        if len(result[place]) > 1
    ]
    heapq.heapify(heap)
    while len(result) < num_bins:
        if not heap:
            raise BatchError(f"{len(result)} items cannot fill {num_bins} bins")
        _, place = heapq.heappop(heap)
        items = result[place]
        own = costs[items]
        if contiguous:
            middle = np.abs(2 * np.cumsum(own)[:-1] - own.sum())
            cut = int(middle.argmin()) + 1
            parts = [items[:cut], items[cut:]]
        else:
            halves = lpt_partition(own.tolist(), 2) or []
            # Dealt by cost, then restored to their original order.
            parts = [[items[index] for index in sorted(half)] for half in halves]
        result[place] = parts[0]
        result.append(parts[1])
        for spot, part in ((place, parts[0]), (len(result) - 1, parts[1])):
            if len(part) > 1:
                heapq.heappush(heap, (-int(costs[part].sum()), spot))
    return result
