from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rl_distributed.batch.balance import (
    bin_loads,
    deal_in_rounds,
    even_bounds,
    load_imbalance,
    lpt_partition,
    split_heaviest,
)
from rl_distributed.errors import BatchError

costs_lists = st.lists(st.integers(1, 100), max_size=50)


@given(st.integers(0, 40), st.integers(1, 9))
def test_even_bounds_are_contiguous(total: int, parts: int) -> None:
    bounds = even_bounds(total, parts)
    assert len(bounds) == parts
    assert [i for a, b in bounds for i in range(a, b)] == list(range(total))
    sizes = [b - a for a, b in bounds]
    assert sizes == sorted(sizes, reverse=True)


def test_even_bounds_leave_trailing_parts_empty() -> None:
    assert [b - a for a, b in even_bounds(5, 4)] == [2, 2, 1, 0]


@given(costs_lists, st.integers(1, 6))
def test_dealing_gives_each_shard_one_item_per_round(
    costs: list[int], num_shards: int
) -> None:
    rounds = deal_in_rounds(costs, num_shards)
    items = [item for row in rounds for item in row if item >= 0]
    assert sorted(items) == list(range(len(costs)))
    assert all(-1 not in row for row in rounds[1:])
    for row, following in itertools.pairwise(rounds):
        assert max(costs[i] for i in row if i >= 0) <= min(costs[i] for i in following)


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(1, 6))
def test_dealing_keeps_loads_within_one_item(costs: list[int], num_shards: int) -> None:
    costs = costs[: len(costs) // num_shards * num_shards] or [1] * num_shards
    rounds = deal_in_rounds(costs, num_shards)
    loads = [sum(costs[row[shard]] for row in rounds) for shard in range(num_shards)]
    assert max(loads) - min(loads) <= max(costs) - min(costs)


def test_earlier_loads_decide_between_equal_ones() -> None:
    assert deal_in_rounds([5, 1], 2, [10, 0]) == [[1, 0]]


@given(costs_lists, st.integers(1, 6))
def test_longest_processing_time_first(costs: list[int], parts: int) -> None:
    found = lpt_partition(costs, parts)
    assert found is not None
    assert sorted(i for part in found for i in part) == list(range(len(costs)))
    loads = [sum(costs[i] for i in part) for part in found]
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert lpt_partition(costs, parts, max(loads)) == found
    if costs:
        assert lpt_partition(costs, parts, max(loads) - 1) is None


def test_the_dearest_items_are_dealt_first() -> None:
    found = lpt_partition([1, 1, 2], 2)
    assert found is not None
    assert sorted(map(sorted, found)) == [[0, 1], [2]]


@pytest.mark.parametrize("contiguous", [False, True])
def test_splitting_takes_the_heaviest_first(contiguous: bool) -> None:
    costs = np.array([5, 5, 5, 1, 1])
    bins = split_heaviest([[0, 1, 2], [3, 4]], costs, 3, contiguous)
    assert sorted(map(sorted, bins)) == sorted(
        [[0], [1, 2], [3, 4]] if contiguous else [sorted(bins[0]), [3, 4], bins[2]]
    )
    assert bin_loads(bins, costs).max() == 10
    with pytest.raises(BatchError, match="cannot fill 6 bins"):
        split_heaviest(bins, costs, 6, contiguous)


def test_imbalance() -> None:
    assert load_imbalance([2, 2, 2]) == 0.0
    assert load_imbalance([4, 2]) == pytest.approx(1 / 3)
    assert load_imbalance([]) == 0.0
    assert bin_loads([], np.array([1])).size == 0
    for call in (deal_in_rounds, lpt_partition):
        with pytest.raises(BatchError, match="must be positive"):
            call([1], 0)
