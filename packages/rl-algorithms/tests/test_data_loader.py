from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings, strategies as st

from rl_algorithms.data.loader import BatchedDataLoader
from rl_algorithms.errors import DataError, EmptyDatasetError


def make(num_rows=10, batch_size=3, **settings):
    return BatchedDataLoader(
        list(range(num_rows)), batch_size, collate_fn=list, **settings
    )


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def test_order_batches_and_length():
    loader = make()
    assert list(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert len(loader) == 4
    dropped = make(drop_last=True)
    assert list(dropped) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert len(dropped) == 3


def test_each_epoch_is_another_permutation():
    loader = make(shuffle=True, seed=4)
    first, second = flat(loader), flat(loader)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert loader.epoch == 2
    assert flat(make(shuffle=True, seed=4)) == first
    assert flat(make(shuffle=True, seed=5)) != first


@settings(max_examples=80, deadline=None)
@given(
    num_rows=st.integers(1, 12),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    taken=st.integers(0, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_resuming_continues_with_the_next_sample(
    num_rows, before, after, taken, shuffle, seed
):
    """For any batch size: no sample is lost or repeated."""

    def stream(loader, num_samples):
        samples = []
        for batch in loader:
            samples += batch
            if len(samples) >= num_samples:
                break
        return samples

    settings = {"shuffle": shuffle, "seed": seed, "endless": True}
    want = stream(make(num_rows, 1, **settings), 80)
    first = make(num_rows, before, **settings)
    head = stream(first, taken * before) if taken else []
    state = json.loads(json.dumps(first.state_dict()))
    second = make(num_rows, after, **settings)
    second.load_state_dict(state)
    tail = stream(second, 20)
    assert (head + tail)[:60] == want[: len(head + tail)][:60]


def test_a_state_saved_within_an_epoch_resumes_after_the_batch_in_use():
    loader = make(shuffle=True, seed=1)
    batches = iter(loader)
    seen = [next(batches), next(batches)]
    state = loader.state_dict()
    rest = list(batches)
    resumed = make(shuffle=True, seed=1)
    resumed.load_state_dict(state)
    assert list(resumed) == rest
    assert sorted(flat(seen + rest)) == list(range(10))
    assert list(resumed) == list(loader)


def test_endless_batches_are_always_full():
    loader = make(4, 3, endless=True)
    batches = iter(loader)
    assert [next(batches) for _ in range(4)] == [
        [0, 1, 2],
        [3, 0, 1],
        [2, 3, 0],
        [1, 2, 3],
    ]
    more_than_all = iter(make(2, 5, endless=True))
    assert next(more_than_all) == [0, 1, 0, 1, 0]


def test_rows_become_columns_by_default():
    (batch,) = BatchedDataLoader([{"a": 1}, {"a": 2}], 2)
    assert batch["a"] == [1, 2]
    assert list(BatchedDataLoader(iter("abc"), 2, collate_fn="".join)) == ["ab", "c"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 3), EmptyDatasetError, "has no rows"),
        ((2, 3, True), EmptyDatasetError, "2 rows but a batch takes 3"),
        ((2, 0), DataError, "at least 1: got 0"),
        ((2, 1.5), DataError, "whole number: got 1.5"),
    ],
)
def test_bad_arguments(arguments, error, message):
    num_rows, batch_size, *drop = arguments
    with pytest.raises(error, match=message):
        make(num_rows, batch_size, drop_last=bool(drop))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 11}, "num_rows was 11 .* is 10 now"),
        ({"seed": 9}, "seed was 9"),
        ({"shuffle": True}, "shuffle was True"),
        ({"position": 99}, "row 99 of 10 is no place"),
        ({"epoch": None}, "lacks epoch"),
    ],
)
def test_states_of_something_else_are_refused(change, message):
    state = {**make().state_dict(), **change}
    state = {key: value for key, value in state.items() if value is not None}
    with pytest.raises(DataError, match=message):
        make().load_state_dict(state)


@pytest.mark.parametrize("endless", [False, True])
def test_shards_partition_every_batch(endless):
    options = {"drop_last": True, "shuffle": True, "seed": 2, "endless": endless}
    whole = make(23, 6, **options)
    shards = [make(23, 6, num_shards=3, shard_index=i, **options) for i in range(3)]
    parts = zip(*shards, strict=False)
    for batch, part in zip(whole, itertools.islice(parts, 5), strict=False):
        assert [len(rows) for rows in part] == [2, 2, 2]
        assert sorted(itertools.chain(*part)) == sorted(batch)


def test_a_state_fits_another_number_of_shards():
    first = make(24, 6, drop_last=True, num_shards=2, shard_index=1)
    next(iter(first))
    second = make(24, 6, drop_last=True, num_shards=3, shard_index=0)
    second.load_state_dict(first.state_dict())
    assert next(iter(second)) == [6, 9]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_shards": 2, "shard_index": 2, "drop_last": True}, "shard_index must"),
        ({"num_shards": 2, "drop_last": True}, "multiple of num_shards.*use 4"),
        ({"num_shards": 3}, "drop_last or endless"),
    ],
)
def test_impossible_shards(settings, message):
    with pytest.raises(DataError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    ("rows", "shards", "size"), [(100, 1, 32), (5, 1, 5), (7, 2, 6)]
)
def test_batch_size_by_default(rows, shards, size):
    loader = BatchedDataLoader(
        [{"n": n} for n in range(rows)], num_shards=shards, drop_last=shards > 1
    )
    assert loader.batch_size == size
    assert next(iter(loader))["n"] == list(range(0, size, shards))


def test_no_rows_by_default():
    with pytest.raises(EmptyDatasetError, match="has no rows"):
        BatchedDataLoader([])


def test_rows_of_other_columns():
    loader = BatchedDataLoader([{"prompt": "a"}, {"text": "b"}])
    with pytest.raises(DataError, match=r"same columns: got 'text' beside 'prompt'"):
        next(iter(loader))


def test_rows_that_are_no_mappings():
    with pytest.raises(DataError, match="must be a mapping of columns: got int 1"):
        next(iter(BatchedDataLoader([1, 2])))


def test_shards_that_cannot_be_with_the_default_size():
    with pytest.raises(DataError, match="shard_index must be from 0"):
        BatchedDataLoader([{"n": 1}], num_shards=0)
