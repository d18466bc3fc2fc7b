from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from rl_distributed.batch.balance import load_imbalance
from rl_distributed.batch.batched_data_dict import (
    BatchedDataDict,
    DynamicBatchingArgs,
    SequencePackingArgs,
    SlicedDataDict,
)
from rl_distributed.errors import BatchError, PackingError

WIDTH = 16
DYNAMIC: DynamicBatchingArgs = {
    "max_tokens_per_microbatch": 40,
    "sequence_length_round": 4,
    "input_key": "ids",
    "input_lengths_key": "lengths",
}
PACKING: SequencePackingArgs = {
    "max_tokens_per_microbatch": 40,
    "input_key": "ids",
    "input_lengths_key": "lengths",
    "algorithm": "modified_first_fit_decreasing",
    "sequence_length_pad_multiple": 4,
}


def batch_of(lengths: list[int]) -> BatchedDataDict[Any]:
    rows = torch.arange(len(lengths))
    return BatchedDataDict(
        {
            "ids": rows[:, None].repeat(1, WIDTH),
            "lengths": torch.tensor(lengths, dtype=torch.int64),
            "row": rows,
            "name": [str(row) for row in range(len(lengths))],
        }
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[BatchedDataDict[Any], int, int]:
    shards = draw(st.integers(1, 4))
    batch_size = shards * draw(st.integers(1, 6))
    rows = batch_size * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, WIDTH), min_size=rows, max_size=rows))
    return batch_of(lengths), shards, batch_size


# ----------------------------------------------------------------------------- sharding


def test_plain_shards_take_a_part_of_each_global_batch() -> None:
    shards = batch_of([1] * 8).shard_by_batch_size(2, batch_size=4)
    assert [shard["row"].tolist() for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert shards[1]["name"] == ["2", "3", "6", "7"]
    assert all(type(shard) is SlicedDataDict for shard in shards)
    assert shards[1].get_batch(1, 2)["row"].tolist() == [6, 7]


@given(batches())
def test_plain_shards_hold_every_row_once(case: Any) -> None:
    batch, shards, batch_size = case
    found = batch.shard_by_batch_size(shards, batch_size)
    per = batch_size // shards
    for index in range(batch.size // batch_size):
        rows = [row for s in found for row in s.get_batch(index, per)["row"].tolist()]
        assert rows == list(range(index * batch_size, (index + 1) * batch_size))


@pytest.mark.parametrize(
    ("rows", "sizes"), [(5, [2, 2, 1, 0]), (2, [1, 1, 0, 0]), (0, [0, 0, 0, 0])]
)
def test_uneven_shards_can_be_empty(rows: int, sizes: list[int]) -> None:
    shards = batch_of([1] * rows).shard_by_batch_size(4, allow_uneven_shards=True)
    assert [shard.size for shard in shards] == sizes
    assert all(shard["ids"].shape == (shard.size, WIDTH) for shard in shards)


@given(batches())
def test_dynamic_batching_restores_the_order_with_any_batch_size(case: Any) -> None:
    batch, shards, batch_size = case
    found, order = batch.shard_by_batch_size(
        shards, batch_size, dynamic_batching_args=DYNAMIC
    )
    joined = BatchedDataDict.from_batches(found)
    assert joined["row"].tolist() == order
    joined.reorder_data(order)
    assert joined["row"].tolist() == list(range(batch.size))
    assert joined["name"] == batch["name"]


@given(batches())
def test_dynamic_micro_batches_are_the_same_in_every_shard(case: Any) -> None:
    batch, shards, batch_size = case
    found, _ = batch.shard_by_batch_size(
        shards, batch_size, dynamic_batching_args=DYNAMIC
    )
    for index in range(batch.size // batch_size):
        parts = [shard.get_batch(index, batch_size // shards) for shard in found]
        seen: list[int] = []
        for part in parts:
            assert part.micro_batch_indices == parts[0].micro_batch_indices
            assert part.micro_batch_lengths == parts[0].micro_batch_lengths
            count = part.get_microbatch_iterator_dynamic_shapes_len()
            micro = list(part.make_microbatch_iterator_with_dynamic_shapes())
            assert len(micro) == count
            for piece in micro:
                rows, width = piece["ids"].shape
                assert rows * width <= 40
                assert piece["lengths"].max() <= width
                assert width % 4 == 0
                seen += piece["row"].tolist()
        assert sorted(seen) == list(range(index * batch_size, (index + 1) * batch_size))


@given(st.lists(st.integers(1, WIDTH), max_size=20), st.integers(1, 5))
def test_dynamic_batching_works_with_uneven_shards(
    lengths: list[int], shards: int
) -> None:
    batch = batch_of(lengths)
    found, order = batch.shard_by_batch_size(
        shards, allow_uneven_shards=True, dynamic_batching_args=DYNAMIC
    )
    joined = BatchedDataDict.from_batches(found)
    joined.reorder_data(order)
    assert joined["row"].tolist() == list(range(len(lengths)))
    sizes = [shard.size for shard in found]
    assert max(sizes) - min(sizes) <= 1
    if not lengths:
        return
    counts = {s.get_microbatch_iterator_dynamic_shapes_len() for s in found}
    assert len(counts) == 1
    for shard in found:
        pieces = list(shard.make_microbatch_iterator_with_dynamic_shapes())
        assert sum(piece.size for piece in pieces) == shard.size
        for piece in pieces:
            assert piece["ids"].numel() <= 40
            assert all(n <= piece["ids"].shape[1] for n in piece["lengths"].tolist())


@given(batches(), st.sampled_from(["packer", "largest_first"]))
def test_packing_restores_the_order_and_respects_the_budget(
    case: Any, order_of: Any
) -> None:
    batch, shards, batch_size = case
    args: SequencePackingArgs = {**PACKING, "microbatch_order": order_of}
    found, order = batch.shard_by_batch_size(
        shards, batch_size, sequence_packing_args=args
    )
    joined = BatchedDataDict.from_batches(found)
    joined.reorder_data(order)
    assert joined["row"].tolist() == list(range(batch.size))
    for index in range(batch.size // batch_size):
        parts = [shard.get_batch(index) for shard in found]
        rows = sorted(row for part in parts for row in part["row"].tolist())
        assert rows == list(range(index * batch_size, (index + 1) * batch_size))
        shapes = [
            part.get_microbatch_iterator_for_packable_sequences_len() for part in parts
        ]
        assert len({bins for bins, _ in shapes}) == 1
        for part, (bins, longest) in zip(parts, shapes, strict=True):
            tokens = [
                int((-(-piece["lengths"] // 4) * 4).sum())
                for piece in part.make_microbatch_iterator_for_packable_sequences()
            ]
            assert part.micro_batch_lengths == [tokens]
            assert len(tokens) == bins
            assert max(tokens) == longest <= 40
            if order_of == "largest_first":
                assert tokens == sorted(tokens, reverse=True)


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_loads_of_shards_differ_by_one_row_or_one_pack_at_most(
    seed: int, shards: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, WIDTH + 1, 16 * shards).tolist()
    batch = batch_of(lengths)
    by_row, _ = batch.shard_by_batch_size(shards, dynamic_batching_args=DYNAMIC)
    tokens = [int(shard["lengths"].sum()) for shard in by_row]
    assert max(tokens) - min(tokens) <= WIDTH
    by_pack, _ = batch.shard_by_batch_size(shards, sequence_packing_args=PACKING)
    padded = [int((-(-shard["lengths"] // 4) * 4).sum()) for shard in by_pack]
    assert max(padded) - min(padded) <= PACKING["max_tokens_per_microbatch"]


def test_a_shard_that_got_more_gets_less_of_the_next_global_batch() -> None:
    batch = batch_of([9, 1] * 4)
    shards, _ = batch.shard_by_batch_size(2, 2, dynamic_batching_args=DYNAMIC)
    assert [int(shard["lengths"].sum()) for shard in shards] == [20, 20]


@pytest.mark.parametrize("kind", ["uniform", "long tail"])
@pytest.mark.parametrize("args", [DYNAMIC, PACKING], ids=["dynamic", "packing"])
def test_ranks_are_loaded_more_evenly_than_by_round_robin(args: Any, kind: str) -> None:
    """On average: by chance a round robin may be even."""
    key = "sequence_packing_args" if "algorithm" in args else "dynamic_batching_args"
    around, ours = [], []
    for seed in range(8):
        generator = np.random.default_rng(seed)
        if kind == "uniform":
            lengths = generator.integers(1, 513, 2000)
        else:
            tail = generator.lognormal(4.5, 0.8, 2000).astype(np.int64)
            lengths = np.clip(tail, 1, 512)
        batch = batch_of(lengths.tolist())
        batch["ids"] = torch.zeros(2000, 512, dtype=torch.int8)
        sizes = {**args, "max_tokens_per_microbatch": 2048}
        shards, _ = batch.shard_by_batch_size(8, **{key: sizes})
        around.append(
            load_imbalance([int(lengths[rank::8].sum()) for rank in range(8)])
        )
        ours.append(load_imbalance([int(shard["lengths"].sum()) for shard in shards]))
    assert np.mean(ours) < np.mean(around) / 3


def refuse(
    batch: BatchedDataDict[Any], expected: str, *args: Any, **kwargs: Any
) -> None:
    with pytest.raises(BatchError, match=expected):
        batch.shard_by_batch_size(*args, **kwargs)


def test_impossible_shardings_are_refused() -> None:
    batch = batch_of([3] * 6)
    refuse(batch, "must be a multiple of shards: got 6 with shards=4; 4 or 8", 4)
    refuse(batch, "must be a multiple of batch_size: got 6", 2, 4)
    refuse(batch, "batch_size must be a multiple of shards: got 3", 2, 3)
    refuse(batch, "shards must be a positive integer: got 0", 0)
    refuse(batch, "batch_size must be a positive integer", 1, 0)
    refuse(batch, "exclude each other", 2, 6, True)
    both = {"dynamic_batching_args": DYNAMIC, "sequence_packing_args": PACKING}
    refuse(batch, "exclude each other", 2, **both)
    refuse(BatchedDataDict(), "without columns", 2)
    uneven = BatchedDataDict(a=[1])
    uneven["b"] = [1, 2]
    refuse(uneven, "a has 1, b has 2", 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_tokens_per_microbatch": 8}, r"row 5 has 9 tokens \(12 with padding\)"),
        ({"input_key": "idz"}, "no column 'idz'; did you mean 'ids'"),
        ({"input_lengths_key": "name"}, "one integer per row"),
        ({"input_key": "row"}, "must have a sequence dimension"),
        ({"max_tokens": 8}, "no key 'max_tokens'"),
        ({"max_tokens_per_microbatch": 0}, "must be a positive integer"),
        ({"max_tokens_per_microbatch": "8"}, "must be a positive integer"),
    ],
)
@pytest.mark.parametrize("kind", ["dynamic_batching_args", "sequence_packing_args"])
def test_impossible_micro_batches_are_refused(
    kind: str, changes: dict[str, Any], expected: str
) -> None:
    args = {**(DYNAMIC if kind.startswith("dynamic") else PACKING), **changes}
    refuse(batch_of([3, 3, 3, 3, 3, 9]), expected, 2, **{kind: args})


ODD_BUDGETS = st.tuples(
    st.lists(st.integers(1, WIDTH), min_size=2, max_size=12).map(
        lambda lengths: lengths + lengths[: len(lengths) % 2]
    ),
    st.integers(1, 50),
    st.integers(1, 7),
    st.sampled_from([1, 2]),
)


def padded_tokens(lengths: list[int], multiple: int, kind: str) -> int:
    """Return the tokens of a micro-batch of these rows, padding included."""
    rounded = [-(-length // multiple) * multiple for length in lengths]
    if kind == "packing":
        return sum(rounded)
    return len(rounded) * min(max(rounded), WIDTH)


@pytest.mark.parametrize("kind", ["dynamic", "packing"])
@settings(max_examples=150, derandomize=True, deadline=None)
@given(ODD_BUDGETS)
def test_a_budget_need_not_be_a_multiple_of_the_rounding(kind: str, case: Any) -> None:
    """The rounded-up sizes must fit, not the bare lengths, nor in a rounded budget."""
    lengths, budget, multiple, group = case
    args: dict[str, Any] = (
        {"dynamic_batching_args": {**DYNAMIC, "sequence_length_round": multiple}}
        if kind == "dynamic"
        else {
            "sequence_packing_args": {
                **PACKING,
                "sequence_length_pad_multiple": multiple,
            }
        }
    )
    next(iter(args.values()))["max_tokens_per_microbatch"] = budget
    groups = [lengths[i : i + group] for i in range(0, len(lengths), group)]
    fits = all(padded_tokens(rows, multiple, kind) <= budget for rows in groups)
    batch = batch_of(lengths)
    if not fits:
        with pytest.raises(
            PackingError, match=f"max_tokens_per_microbatch is {budget}"
        ):
            batch.shard_by_batch_size(1, rows_per_group=group, **args)
        return
    (shard,), _ = batch.shard_by_batch_size(1, rows_per_group=group, **args)
    cuts, widths = shard.micro_batch_indices[0], shard.micro_batch_lengths[0]
    for (start, end), width in zip(cuts, widths, strict=True):
        held = shard["lengths"][start:end].tolist()
        tokens = padded_tokens(held, multiple, kind)
        assert tokens <= budget
        assert tokens == (width if kind == "packing" else width * len(held))
    if kind == "dynamic":
        # The budget is used up: one more group would not have fitted.
        for (start, end), (_, after) in itertools.pairwise(cuts):
            more = shard["lengths"][start : min(end + group, after)].tolist()
            assert padded_tokens(more, multiple, kind) > budget


def test_tensors_without_values_are_refused() -> None:
    batch = batch_of([3, 3])
    meta = BatchedDataDict({**batch, "lengths": batch["lengths"].to("meta")})
    for kind, args in (
        ("dynamic_batching_args", DYNAMIC),
        ("sequence_packing_args", PACKING),
    ):
        refuse(
            meta, "column 'lengths' must hold values: .* meta device", 1, **{kind: args}
        )
    with pytest.raises(BatchError, match="a selection of rows must hold values"):
        batch.select_indices(torch.zeros(1, dtype=torch.int64, device="meta"))
    with pytest.raises(BatchError, match="column 'lengths' must hold values"):
        meta.copy().to("cpu")
    with pytest.raises(BatchError, match="column 'lengths' must hold values"):
        pickle.dumps(meta)
    assert batch_of([3]).to("meta")["ids"].is_meta
    assert meta.slice(0, 1).to("meta").size == 1


def test_more_refused_micro_batches() -> None:
    short = {k: v for k, v in DYNAMIC.items() if k != "sequence_length_round"}
    refuse(batch_of([3]), "needs sequence_length_round", 1, dynamic_batching_args=short)
    wide = batch_of([3, WIDTH + 1])
    refuse(
        wide, "row 1 has 17 tokens, but 'ids' is 16", 2, dynamic_batching_args=DYNAMIC
    )
    for kwargs, expected in (
        ({"microbatch_order": "biggest"}, "must be 'packer' or 'largest_first'"),
        ({"algorithm": "first_fit"}, "unknown packing algorithm"),
    ):
        args = {**PACKING, **kwargs}
        refuse(batch_of([3, 3]), expected, 2, sequence_packing_args=args)
    with pytest.raises(PackingError, match="must be positive: row 1 has 0"):
        batch_of([3, 0]).shard_by_batch_size(1, sequence_packing_args=PACKING)
    with pytest.raises(PackingError, match=r"4 bins .* need as many sequences: got 2"):
        batch_of([3, 3]).shard_by_batch_size(
            4, allow_uneven_shards=True, sequence_packing_args=PACKING
        )


# ----------------------------------------------------------------- the micro-batch plan


def packed() -> SlicedDataDict:
    shards, _ = batch_of([3, 9, 5, 7] * 2).shard_by_batch_size(
        1, 4, sequence_packing_args=PACKING
    )
    return shards[0]


KEEP: list[Callable[[BatchedDataDict[Any]], BatchedDataDict[Any]]] = [
    lambda batch: batch.copy(),
    lambda batch: batch.clone(),
    lambda batch: batch.to("cpu"),
    lambda batch: pickle.loads(pickle.dumps(batch)),
]
DROP: list[Callable[[BatchedDataDict[Any]], BatchedDataDict[Any]]] = [
    lambda batch: batch.slice(0, 2),
    lambda batch: batch.select_indices([1, 0]),
    lambda batch: batch.chunk(0, 2),
    lambda batch: batch.repeat_interleave(2),
    lambda batch: BatchedDataDict.from_batches([batch]),
]


@pytest.mark.parametrize("change", KEEP)
def test_what_keeps_rows_in_place_keeps_the_plan(change: Any) -> None:
    before, after = packed(), change(packed())
    assert after.micro_batch_indices == before.micro_batch_indices
    assert after.micro_batch_lengths == before.micro_batch_lengths
    assert after.elem_counts_per_gb == [4, 4]
    assert type(after) is SlicedDataDict


@pytest.mark.parametrize("change", DROP)
def test_what_moves_rows_drops_the_plan(change: Any) -> None:
    after = change(packed())
    assert after.micro_batch_indices is None
    assert after.elem_counts_per_gb is None
    with pytest.raises(BatchError, match="no micro-batches of sequence packing"):
        after.make_microbatch_iterator_for_packable_sequences()


def test_reordering_drops_the_plan() -> None:
    batch = packed()
    batch.reorder_data(list(range(8)))
    assert batch.micro_batch_indices is None


def test_iterators_need_one_global_batch_of_their_kind() -> None:
    batch = packed()
    with pytest.raises(
        BatchError, match="has 2 global batches; take one with get_batch"
    ):
        batch.make_microbatch_iterator_for_packable_sequences()
    with pytest.raises(BatchError, match="no micro-batches of dynamic batching"):
        batch.get_batch(0).make_microbatch_iterator_with_dynamic_shapes()
    with pytest.raises(BatchError, match="no global batch 2"):
        batch.get_batch(2)
    with pytest.raises(BatchError, match="needs batch_size"):
        batch_of([1]).get_batch(0)
    dynamic, _ = batch_of([1] * 8).shard_by_batch_size(
        1, 4, dynamic_batching_args=DYNAMIC
    )
    with pytest.raises(BatchError, match="cuts it into 4"):
        dynamic[0].get_batch(0, 2)


def test_dynamic_shapes_cut_only_columns_as_wide_as_the_input() -> None:
    batch = batch_of([2, 3])
    batch["narrow"] = torch.zeros(2, 3)
    batch["other"] = torch.zeros(2, WIDTH + 1)
    batch["mask"] = torch.ones(2, WIDTH)
    shards, _ = batch.shard_by_batch_size(1, dynamic_batching_args=DYNAMIC)
    (piece,) = shards[0].make_microbatch_iterator_with_dynamic_shapes()
    assert piece["ids"].shape == piece["mask"].shape == (2, 4)
    assert piece["narrow"].shape == (2, 3)
    assert piece["other"].shape == (2, WIDTH + 1)


def test_plain_micro_batches() -> None:
    batch = batch_of([1] * 6)
    pieces = list(batch.make_microbatch_iterator(2))
    assert [piece["row"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(BatchError, match="multiple of microbatch_size: got 6"):
        batch.make_microbatch_iterator(4)


# --------------------------------------------------------------------------------- rows


def test_from_batches_pads_dimension_one() -> None:
    joined = BatchedDataDict.from_batches(
        [
            {"b": torch.ones(1, 2), "a": ["x"], "c": torch.zeros(1, 2, 3)},
            {},
            {"b": torch.ones(2, 3), "a": ["y", "z"], "c": torch.zeros(2, 1, 3)},
        ],
        pad_value_dict={"b": 7},
    )
    assert list(joined) == ["a", "b", "c"]
    assert joined["a"] == ["x", "y", "z"]
    assert joined["b"].tolist() == [[1, 1, 7], [1, 1, 1], [1, 1, 1]]
    assert joined["c"].shape == (3, 2, 3)
    assert BatchedDataDict.from_batches([]).size == 0


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"a": [1], "b": [1]}, {"a": [1]}, r"'b' is missing in batches \[1\] of 2"),
        ({"a": torch.zeros(1)}, {"a": torch.zeros(1).long()}, "same dtype"),
        ({"a": torch.zeros(1)}, {"a": torch.zeros(1, 1)}, "same ndim"),
        ({"a": torch.zeros(1)}, {"a": [1]}, "a tensor in some batches, a list in"),
        ({"a": torch.zeros(1, 2, 3)}, {"a": torch.zeros(1, 2, 4)}, "dimension 1 only"),
        ({"a": [1, 2], "b": [1]}, {"a": [1], "b": [1]}, "a has 2, b has 1"),
    ],
)
def test_batches_that_do_not_fit_are_refused(
    first: Any, second: Any, expected: str
) -> None:
    with pytest.raises(BatchError, match=expected):
        BatchedDataDict.from_batches([first, second])


@given(st.permutations(range(7)))
def test_reordering_undoes_any_selection(order: list[int]) -> None:
    batch = batch_of([1] * 7).select_indices(order)
    batch.reorder_data(order)
    assert batch["row"].tolist() == list(range(7))
    assert batch["name"] == [str(row) for row in range(7)]


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [0, 1, 3], [-1, 0, 1]])
def test_reordering_needs_a_permutation(order: list[int]) -> None:
    with pytest.raises(BatchError, match="every original position"):
        batch_of([1, 1, 1]).reorder_data(order)


def test_slices_never_truncate_silently() -> None:
    batch = BatchedDataDict(a=["x", "y"])
    assert batch.slice(1, 2)["a"] == ["y"]
    assert batch.slice(2, 2).size == 0
    for start, end in ((0, 3), (-1, 1), (2, 1)):
        with pytest.raises(BatchError, match="within the 2 rows"):
            batch.slice(start, end)


def test_chunks() -> None:
    batch = batch_of([1] * 8)
    parts = [batch.chunk(rank, 8)["row"].tolist() for rank in range(8)]
    assert parts == [[row] for row in range(8)]
    part = batch.chunk(0, 2)
    part["row"][0] = 99
    assert batch["row"][0] == 0
    for rank in (8, -1):
        with pytest.raises(BatchError, match=r"rank must be in 0\.\.7"):
            batch.chunk(rank, 8)
    with pytest.raises(BatchError, match="multiple of chunks"):
        batch.chunk(0, 3)


def test_selection() -> None:
    batch = batch_of([1] * 4)
    for rows in ([3, 1], torch.tensor([3, 1]), np.array([3, 1])):
        assert batch.select_indices(rows)["name"] == ["3", "1"]
    mask = torch.tensor([False, True, False, True])
    assert batch.select_indices(mask)["row"].tolist() == [1, 3]
    assert batch.select_indices([])["ids"].shape == (0, WIDTH)
    for rows, expected in (
        ([4], "row 4 does not exist"),
        ([-1], "row -1 does not exist"),
        ([0.5], "integers or booleans"),
        ([True], "one value per row"),
    ):
        with pytest.raises(BatchError, match=expected):
            batch.select_indices(rows)  # type: ignore[arg-type]


def test_repeats_are_independent() -> None:
    batch = BatchedDataDict(a=torch.tensor([1, 2]), b=[{"x": []}, {"x": []}])
    repeated = batch.repeat_interleave(2)
    assert repeated["a"].tolist() == [1, 1, 2, 2]
    repeated["b"][0]["x"].append(1)
    assert repeated["b"] == [{"x": [1]}, {"x": []}, {"x": []}, {"x": []}]
    assert batch["b"][0] == {"x": []}
    with pytest.raises(BatchError, match="num_repeats must be a positive"):
        batch.repeat_interleave(0)


def test_truncation() -> None:
    batch = BatchedDataDict(a=torch.zeros(2, 5), b=torch.zeros(2), c=torch.zeros(2, 3))
    batch.truncate_tensors(1, 4)
    assert batch["a"].shape == (2, 4)
    assert batch["c"].shape == (2, 3)
    batch.truncate_tensors(1, 2, keys=["a"])
    assert batch["c"].shape == (2, 3)
    with pytest.raises(BatchError, match="at least 1"):
        batch.truncate_tensors(0, 1)


# ------------------------------------------------------------------------------ columns


def test_arrays_become_columns() -> None:
    array = np.arange(3)
    batch = BatchedDataDict(
        n=array, s=np.array(["a", "b", "c"]), o=np.array([1, None, "x"], dtype=object)
    )
    assert torch.equal(batch["n"], torch.arange(3))
    array[0] = 5
    assert batch["n"][0] == 5
    assert batch["s"] == ["a", "b", "c"]
    assert batch["o"] == [1, None, "x"]
    read_only = np.arange(3)
    read_only.setflags(write=False)
    batch["r"] = read_only
    batch["b"] = np.arange(3)[::-1]
    batch["e"] = np.arange(3, dtype=">i4")
    assert batch["b"].tolist() == [2, 1, 0]
    assert batch["e"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "must be a tensor, a list or a numpy array: got int"),
        ("text", "got str"),
        ((1, 2), r"got tuple; use list\(...\)"),
        (None, "got NoneType"),
        (torch.tensor(1), "one item per row: got a single Tensor"),
        (np.float32(1), "one item per row"),
        (np.array(["2020"], dtype="datetime64[D]"), "which torch lacks"),
    ],
)
def test_other_values_are_refused(value: Any, expected: str) -> None:
    with pytest.raises(BatchError, match=f"column 'a'.*{expected}"):
        BatchedDataDict(a=value)


def test_the_size_is_that_of_every_column() -> None:
    batch = BatchedDataDict(a=[1, 2], b=torch.zeros(2))
    assert batch.size == 2
    assert "b=float32[2]" in repr(batch)
    batch["c"] = [1]
    with pytest.raises(BatchError, match="a has 2, b has 2, c has 1"):
        _ = batch.size
    assert BatchedDataDict().size == 0
    assert batch.get_dict() is batch.data


# ----------------------------------------------------------------------------- pickling


def through_the_store(batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], int]:
    """Pickle with out-of-band buffers and read-only memory, as Ray does."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(data, buffers=shared), len(data)


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.complex64, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(5,), (5, 3), (0,), (0, 4), (5, 0), (2, 3, 4)], ids=str
)
def test_tensors_arrive_exactly(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    for received in (
        through_the_store(BatchedDataDict(a=tensor))[0],
        pickle.loads(pickle.dumps(BatchedDataDict(a=tensor), protocol=4)),
    ):
        found = received["a"]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        size = tensor.element_size()
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        assert torch.equal(found.view(carrier), tensor.contiguous().view(carrier))


def test_columns_given_together_have_the_same_number_of_rows() -> None:
    expected = "must have the same number of rows: text has 1, x has 2"
    columns = {"text": ["a"], "x": torch.zeros(2)}
    for make in (
        lambda: BatchedDataDict(text=["a"], x=torch.zeros(2)),
        lambda: BatchedDataDict(columns),
        lambda: SlicedDataDict({"text": ["a"]}, x=torch.zeros(2)),
        lambda: BatchedDataDict.from_batches([columns]),
    ):
        with pytest.raises(BatchError, match=expected):
            make()
    # A column can get another number of rows.
    batch = BatchedDataDict(text=["a", "b"], x=torch.zeros(2))
    batch["x"] = torch.zeros(1)
    with pytest.raises(BatchError, match="text has 2, x has 1"):
        _ = batch.size
    batch["text"] = ["a"]
    assert batch.size == 1


def test_memory_layout_and_gradients_do_not_travel() -> None:
    base = torch.randn(4, 6, requires_grad=True)
    batch = BatchedDataDict(
        t=base.T[:4], strided=base[:, ::2], slice=base[1:3].repeat(2, 1)
    )
    received = through_the_store(BatchedDataDict(dict(batch.items())))[0]
    for key, column in batch.items():
        assert torch.equal(received[key], column)
        assert not received[key].requires_grad
    small = BatchedDataDict(a=torch.zeros(10**6)[:2])
    assert len(pickle.dumps(small)) < 2000


def test_large_columns_are_out_of_band_and_share_memory() -> None:
    ragged = [torch.arange(n) for n in (3, 0, 5)]
    batch = BatchedDataDict(a=torch.randn(3, 10**4), r=ragged, t=["x", {"y": 1}, None])
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 3000
    shared = bytearray(buffers[0].raw())
    memory = memoryview(shared).toreadonly()
    received = pickle.loads(data, buffers=[memory, *buffers[1:]])
    assert torch.equal(received["a"], batch["a"])
    shared[:4] = np.float32(7).tobytes()
    assert received["a"][0, 0] == 7
    assert all(torch.equal(x, y) for x, y in zip(received["r"], ragged, strict=True))
    assert received["t"] == batch["t"]
    own = received.clone()
    own["a"][0, 0] = 8
    assert received["a"][0, 0] == 7


def test_a_deep_copy_is_independent() -> None:
    batch = BatchedDataDict(a=torch.zeros(2), b=[[], []])
    other = copy.deepcopy(batch)
    other["a"][0] = 1
    other["b"][0].append(1)
    assert batch["a"][0] == 0
    assert batch["b"] == [[], []]


@pytest.mark.usefixtures("ray_cluster")
def test_ray_shares_the_memory() -> None:
    batch = BatchedDataDict(
        a=torch.randn(64, 1000).bfloat16(), b=torch.zeros(64, 0), t=["x"] * 64
    )
    reference = ray.put(batch)
    first, second = ray.get(reference), ray.get(reference)
    assert torch.equal(first["a"], batch["a"])
    assert first["b"].shape == (64, 0)
    assert first["t"] == batch["t"]
    assert first["a"].data_ptr() == second["a"].data_ptr()


def test_all_gather_joins_ranks(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        batch = batch_of([1, 2, 3])
        gathered = batch.all_gather()
    finally:
        dist.destroy_process_group()
    assert gathered["row"].tolist() == [0, 1, 2]
    assert gathered["name"] == batch["name"]


def test_columns_of_another_mapping_are_checked_as_those_set_one_by_one() -> None:
    batch = batch_of([1, 2])
    before = batch
    batch |= {"reward": np.array([0.5, 1.0])}
    batch |= BatchedDataDict({"name": ["a", "b"]})
    assert batch is before
    assert isinstance(batch["reward"], torch.Tensor)
    assert batch["name"] == ["a", "b"]
    with pytest.raises(BatchError, match="'pair' must be a tensor, a list or a numpy"):
        batch |= {"pair": (1, 2)}
