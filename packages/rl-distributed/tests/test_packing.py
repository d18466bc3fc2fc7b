from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rl_distributed.batch.packing import PackingAlgorithm, get_packer
from rl_distributed.errors import PackingError

ALGORITHMS = list(PackingAlgorithm)
CAPACITY = 60
lengths_lists = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60)


def first_fit(lengths: list[int], order: list[int], capacity: int) -> list[list[int]]:
    """Compute the definition, one sequence and one bin at a time."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        for place, left in enumerate(room):
            if lengths[index] <= left:
                bins[place].append(index)
                room[place] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(capacity - lengths[index])
    return bins


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=lengths_lists)
def test_every_sequence_is_in_one_bin_and_no_bin_overflows(
    algorithm: PackingAlgorithm, lengths: list[int]
) -> None:
    bins = get_packer(algorithm, CAPACITY).pack(lengths)
    assert sorted(index for items in bins for index in items) == list(
        range(len(lengths))
    )
    assert all(items and sum(lengths[i] for i in items) <= CAPACITY for items in bins)
    assert bins == get_packer(algorithm, CAPACITY).pack(np.array(lengths))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=lengths_lists, least=st.integers(1, 9), multiple=st.integers(1, 5))
def test_the_number_of_bins_is_adjusted(
    algorithm: PackingAlgorithm, lengths: list[int], least: int, multiple: int
) -> None:
    free = len(get_packer(algorithm, CAPACITY).pack(lengths))
    wanted = -(-max(free, least) // multiple) * multiple
    packer = get_packer(
        algorithm, CAPACITY, min_bin_count=least, bin_count_multiple=multiple
    )
    if wanted > len(lengths):
        with pytest.raises(PackingError, match="need as many sequences"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert len(bins) == wanted
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    assert all(items and sum(lengths[i] for i in items) <= CAPACITY for items in bins)


@given(lengths=lengths_lists)
def test_first_fit_decreasing_equals_its_definition(lengths: list[int]) -> None:
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    packer = get_packer("first_fit_decreasing", CAPACITY)
    assert packer.pack(lengths) == first_fit(lengths, order, CAPACITY)


@given(lengths=lengths_lists, seed=st.integers(0, 5))
def test_first_fit_shuffle_equals_its_definition(lengths: list[int], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    packer = get_packer("first_fit_shuffle", CAPACITY, seed=seed)
    assert packer.pack(lengths) == first_fit(lengths, order, CAPACITY)


@given(lengths=lengths_lists)
def test_concatenative_keeps_the_order(lengths: list[int]) -> None:
    bins = get_packer("concatenative", CAPACITY).pack(lengths)
    assert [i for items in bins for i in items] == list(range(len(lengths)))
    for items, following in itertools.pairwise(bins):
        assert sum(lengths[i] for i in items) + lengths[following[0]] > CAPACITY


def modified_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Compute Johnson and Garey's five phases by definition, on lists of lengths."""
    left = sorted(lengths, reverse=True)
    bins = [[length] for length in left if length * 2 > capacity]
    left = left[len(bins) :]
    medium = capacity / 3
    with_medium = set()

    def fitting(place: int, above: float = 0, upto: float = capacity) -> list[int]:
        room = capacity - sum(bins[place])
        return [length for length in left if above < length <= min(room, upto)]

    def put(place: int, length: int) -> None:
        left.remove(length)
        bins[place].append(length)

    for place in range(len(bins)):
        if found := fitting(place, above=medium):
            put(place, max(found))
            with_medium.add(place)
    for place in reversed(range(len(bins))):
        small = sorted(x for x in left if capacity / 6 < x <= medium)
        room = capacity - sum(bins[place])
        if place not in with_medium and len(small) > 1 and sum(small[:2]) <= room:
            put(place, small[0])
            put(place, max(fitting(place, capacity / 6, medium)))
    for place in range(len(bins)):
        while found := fitting(place):
            put(place, max(found))
    rest = first_fit(left, list(range(len(left))), capacity)
    return bins + [[left[index] for index in items] for items in rest]


@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60))
def test_modified_first_fit_equals_its_definition(lengths: list[int]) -> None:
    bins = get_packer("modified_first_fit_decreasing", CAPACITY).pack(lengths)
    found = [[lengths[index] for index in items] for items in bins]
    assert found == modified_first_fit(lengths, CAPACITY)


def test_modified_first_fit_needs_fewer_bins_where_it_should() -> None:
    # Decreasing order separates 27s that fit better beside the large ones.
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    modified = get_packer("modified_first_fit_decreasing", 100).pack(lengths)
    plain = get_packer("first_fit_decreasing", 100).pack(lengths)
    assert len(modified) <= len(plain)


def test_extra_bins_are_filled_evenly() -> None:
    lengths = [10] * 18  # three full bins; eight are requested
    bins = get_packer(
        "modified_first_fit_decreasing", CAPACITY, bin_count_multiple=8
    ).pack(lengths)
    assert sorted(len(items) for items in bins) == [2] * 6 + [3] * 2


def test_metrics() -> None:
    packer = get_packer("concatenative", 10, collect_metrics=True)
    packer.pack([6, 6, 4])
    assert packer.metrics is not None
    assert packer.metrics.num_bins == 2
    assert packer.metrics.min_num_bins == 2
    assert packer.metrics.waste_ratio == pytest.approx(0.2)
    assert packer.metrics.load_imbalance == pytest.approx(10 / 8 - 1)


def test_nothing_packs_into_nothing() -> None:
    assert get_packer("concatenative", 4).pack([]) == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([3, 8], "sequence 1 has 8 tokens, but a bin holds 4"),
        ([3, 0], "must be positive: sequence 1 has 0"),
        ([3, -2], "must be positive"),
        ([1.5], "list of integers"),
        ([[1]], "list of integers"),
    ],
)
def test_wrong_lengths_are_refused(
    algorithm: PackingAlgorithm, lengths: Any, expected: str
) -> None:
    with pytest.raises(PackingError, match=expected):
        get_packer(algorithm, 4).pack(lengths)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(PackingError, match="did you mean 'concatenative'"):
        get_packer("concatenate", 4)
    for wrong in (object(), 3, None, [], PackingAlgorithm):
        with pytest.raises(
            PackingError, match=r"unknown packing algorithm .*known: con"
        ):
            get_packer(wrong, 4)  # type: ignore[arg-type]
    with pytest.raises(PackingError, match="bin_capacity must be a positive integer"):
        get_packer("concatenative", 0)
    with pytest.raises(PackingError, match="min_bin_count must be a positive integer"):
        get_packer("concatenative", 4, min_bin_count=0)
    assert get_packer("FIRST_FIT_DECREASING", 4).pack([1]) == [[0]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_hundred_thousand_sequences_stay_n_log_n(algorithm: PackingAlgorithm) -> None:
    lengths = np.random.default_rng(0).integers(1, 4097, 100_000)
    packer = get_packer(algorithm, 4096, True, bin_count_multiple=8)
    packer.pack(lengths)
    assert packer.metrics is not None
    assert packer.metrics.num_bins % 8 == 0
    if algorithm is not PackingAlgorithm.CONCATENATIVE:
        assert packer.metrics.waste_ratio < 0.02
