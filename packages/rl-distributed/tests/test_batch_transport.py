"""A batch sent between processes: its values, its memory, its size."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import rl_distributed_sample_batches as sample
import torch
from hypothesis import given, strategies as st

from rl_distributed.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rl_distributed.batch.tensor_buffers import EncodedList, carried, encode

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.complex32, torch.complex64, torch.complex128),
]
WAIT_S = 60


def tensor_of(dtype: torch.dtype, rows: int = 6, seed: int = 0) -> torch.Tensor:
    """Return `[rows, 5]` of random bits."""
    size = rows * 5 * dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    if dtype is torch.bool:
        return torch.from_numpy(bits > 100).view(rows, 5)
    carrier = torch.empty(size, dtype=torch.uint8).copy_(torch.from_numpy(bits))
    return carrier.view(dtype).view(rows, 5)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    values = [carried(tensor).contiguous().numpy() for tensor in (first, second)]
    return values[0].tobytes() == values[1].tobytes()


def through_the_store(value: Any) -> tuple[Any, int, int]:
    """Pickle as Ray does; return the value, and the bytes in band and out of band."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer.raw()) for buffer in buffers]
    received = pickle.loads(data, buffers=shared)
    return received, len(data), sum(map(len, shared))


# ------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_in_columns_and_in_lists(dtype: torch.dtype) -> None:
    whole = tensor_of(dtype, 5)
    batch = BatchedDataDict(
        column=whole,
        transposed=tensor_of(dtype, 5).T,
        gaps=whole[:, ::2],
        empty=whole[:, :0],
        rows=list(whole),
        nested=[{"deep": [(row[:n], "x")]} for n, row in enumerate(whole)],
        single=[row[0] for row in whole],
    )
    received, *_ = through_the_store(batch)
    for name in ("column", "transposed", "gaps", "empty"):
        assert same_bits(received[name], batch[name])
        assert not received[name].requires_grad
    for name in ("rows", "single"):
        assert all(map(same_bits, received[name], batch[name]))
    for found, sent in zip(received["nested"], batch["nested"], strict=True):
        ((tensor, text),) = found["deep"]
        assert same_bits(tensor, sent["deep"][0][0])
        assert text == "x"


leaves = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.integers(),
    st.builds(
        lambda dtype, rows: tensor_of(dtype, rows),
        st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
        st.integers(0, 3),
    ),
    st.builds(torch.tensor, st.integers(0, 9)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and same_bits(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(
            equal(first[key], second[key]) for key in first
        )
    return bool(first == second)


@given(st.lists(trees, max_size=4))
def test_any_list_arrives(column: list[Any]) -> None:
    received, *_ = through_the_store(BatchedDataDict(a=column))
    assert equal(column, received["a"])


def test_what_is_not_dense_is_left_to_torch() -> None:
    sparse = torch.eye(3).to_sparse()
    assert encode(sparse) is sparse
    received, *_ = through_the_store(BatchedDataDict(a=[sparse, torch.ones(2)]))
    assert torch.equal(received["a"][0].to_dense(), torch.eye(3))
    assert torch.equal(received["a"][1], torch.ones(2))


def test_lists_of_plain_values_are_not_touched() -> None:
    column = ["a", 1, None, {"x": [1.5]}, ("b",)]
    assert encode(column) is column
    assert isinstance(encode([torch.ones(1)]), EncodedList)


def test_many_small_tensors_are_few_buffers() -> None:
    batch = BatchedDataDict(a=[{"ids": torch.arange(n % 50)} for n in range(2000)])
    _, in_band, out_of_band = through_the_store(batch)
    assert out_of_band >= sum(item["ids"].nbytes for item in batch["a"])
    assert in_band < 40_000


# ------------------------------------------------------------------------------- memory


def test_a_shard_carries_its_own_rows_only() -> None:
    batch = BatchedDataDict(
        ids=torch.arange(80_000).view(8, 10_000), mask=torch.ones(8, 10_000).bool()
    )
    whole = sum(column.nbytes for column in batch.values())
    for shard in (
        *batch.shard_by_batch_size(4),
        batch.slice(2, 4),
        batch.select_indices([1, 7]),
        batch.get_batch(0, 2),
    ):
        _, in_band, out_of_band = through_the_store(shard)
        assert out_of_band == whole // 4
        assert in_band < 2000
    narrow = batch.copy()
    narrow.truncate_tensors(1, 100)
    assert through_the_store(narrow)[2] == whole // 100


def test_writable_copies_what_others_read_and_nothing_else() -> None:
    batch = BatchedDataDict(
        a=torch.ones(3, 4), t=[torch.ones(2), {"x": torch.ones(1)}, "s"], s=["a"] * 3
    )
    batch.micro_batch_lengths = [[1]]
    received, *_ = through_the_store(batch)
    own = received.slice(0, 2).writable()
    assert type(own) is SlicedDataDict
    own["a"].zero_()
    own["t"][0].zero_()
    own["t"][1]["x"].zero_()
    assert received["a"].sum() == 12
    assert received["t"][0].sum() == 2
    assert received["t"][1]["x"].sum() == 1
    again = own.writable()
    assert again["a"].data_ptr() == own["a"].data_ptr()
    assert again["t"] is own["t"]
    assert received.writable()["s"] is received["s"]
    assert received.writable().micro_batch_lengths == [[1]]
    array = np.ones(3)
    BatchedDataDict(n=array).writable()["n"].zero_()
    assert array.sum() == 3


# ------------------------------------------------------------------- in Ray's own store


@pytest.fixture(scope="module")
def readers(ray_cluster: None) -> Any:
    path = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}
    actors = [ray.remote(sample.Reader).options(**options).remote() for _ in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def large_batch() -> BatchedDataDict[Any]:
    return BatchedDataDict(
        a=torch.randn(64, 4000).bfloat16(),
        b=torch.randn(4000, 64).T,
        t=[{"ids": torch.arange(3000) + n} for n in range(64)],
        e=torch.zeros(64, 0),
        s=["x"] * 64,
    )


def test_every_reader_reads_the_stores_memory(readers: Any) -> None:
    batch = large_batch()
    reference = ray.put(batch)
    arguments: list[tuple[Any, str]] = [
        (reference, ""),
        (batch, ""),
        ({"batch": batch, "other": 1}, "dict"),
        ((1, batch), "tuple"),
    ]
    for argument, wrapped in arguments:
        calls = [reader.describe.remote(argument, wrapped) for reader in readers]
        for sums, in_store in ray.get(calls, timeout=WAIT_S):
            assert in_store == {"a": True, "b": True, "t": True}
            assert sums == sample.sums_of(batch)
    first, second = ray.get([reference, reference])
    assert first["a"].data_ptr() == second["a"].data_ptr()
    assert sample.in_store(first["t"][5]["ids"])


def test_results_travel_back_the_same_way(readers: Any) -> None:
    result = ray.get(readers[0].make.remote(), timeout=WAIT_S)
    assert sample.in_store(result["large"])
    assert result["large"].sum() == 100_000
    assert result["name"] == ["row"] * 10
    # A shard cut out of a received batch is sent without the rest.
    shard = ray.get(readers[0].cut.remote(ray.put(large_batch()), 2), timeout=WAIT_S)
    assert shard["a"].shape == (2, 4000)
    assert shard["a"].untyped_storage().nbytes() == shard["a"].nbytes


def test_writing_a_writable_copy_leaves_other_readers_alone(readers: Any) -> None:
    batch = large_batch()
    reference = ray.put(batch)
    ray.get(readers[0].overwrite.remote(reference), timeout=WAIT_S)
    sums, _ = ray.get(readers[1].describe.remote(reference, ""), timeout=WAIT_S)
    assert sums == sample.sums_of(batch)


def test_tensors_outlive_their_references(readers: Any) -> None:
    batch = ray.get(ray.put(large_batch()))
    column = batch["a"]
    total = column.double().sum()
    del batch
    for _ in range(20):  # would reuse the memory if it were free
        ray.put(np.zeros(600_000, dtype=np.uint8))
    assert column.double().sum() == total
