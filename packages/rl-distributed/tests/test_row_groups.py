"""Rows kept together: in one shard, in one micro-batch, in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError

COLUMNS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
PACKING = {
    **COLUMNS,
    "algorithm": "modified_first_fit_decreasing",
    "sequence_length_pad_multiple": 1,
}
DYNAMIC = {**COLUMNS, "sequence_length_round": 2}


def _rows(lengths):
    return BatchedDataDict(
        input_ids=torch.zeros(len(lengths), 9, dtype=torch.long),
        input_lengths=torch.tensor(lengths),
    )


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("way", ["plain", "dynamic", "packed"])
@pytest.mark.parametrize("group", [2, 3])
def test_groups_are_never_split(shards, way, group):
    rows = np.random.default_rng(0).integers(1, 10, 72).tolist()
    arguments = {
        "plain": {},
        "dynamic": {
            "dynamic_batching_args": {
                **COLUMNS,
                "max_tokens_per_microbatch": 9 * group + 4,
                "sequence_length_round": 2,
            }
        },
        "packed": {
            "sequence_packing_args": {**PACKING, "max_tokens_per_microbatch": 30}
        },
    }[way]
    batch = _rows(rows)
    batch["place"] = torch.arange(72)
    made = batch.shard_by_batch_size(shards, 36, rows_per_group=group, **arguments)
    parts = made[0] if arguments else made
    seen = []
    for shard in parts:
        for chunk in range(2):
            part = shard.get_batch(chunk, 36 // shards)
            cuts = part.micro_batch_indices or [[[0, part.size]]]
            for start, stop in cuts[0]:
                places = part["place"][start:stop].view(-1, group)
                assert (places[:, 0] % group == 0).all()
                assert (places.diff(dim=1) == 1).all()
                assert (places // 36 == chunk).all()
                if way == "packed":
                    assert part["input_lengths"][start:stop].sum() <= 30
                seen += places.flatten().tolist()
    assert sorted(seen) == list(range(72))
    if arguments:
        joined = BatchedDataDict.from_batches(parts)
        joined.reorder_data(made[1])
        assert joined["place"].tolist() == list(range(72))


def test_a_group_must_fit_and_divide():
    rows = _rows([2, 9, 3, 3, 8, 1])
    with pytest.raises(BatchError, match="rows 0 to 1 belong together"):
        rows.shard_by_batch_size(
            1,
            sequence_packing_args={**PACKING, "max_tokens_per_microbatch": 10},
            rows_per_group=2,
        )
    with pytest.raises(BatchError, match="rows_per_group"):
        rows.shard_by_batch_size(1, rows_per_group=4)
    with pytest.raises(BatchError, match="batch_size"):
        rows.shard_by_batch_size(1, 3, rows_per_group=2)


@pytest.mark.parametrize(
    ("way", "lengths", "message"),
    [
        ("sequence_packing_args", [5, 5, 5, 0], "positive: row 3 has 0"),
        ("sequence_packing_args", [5, 5, 9, -2], "positive: row 3 has -2"),
        ("dynamic_batching_args", [5, 5, -2, 9], "at least 0: row 2 has -2"),
    ],
)
def test_a_length_that_no_row_has_is_refused_in_a_group_too(way, lengths, message):
    kind = PACKING if way == "sequence_packing_args" else DYNAMIC
    arguments = {way: {**kind, "max_tokens_per_microbatch": 30}}
    for group in (1, 2):
        with pytest.raises(BatchError, match=message):
            _rows(lengths).shard_by_batch_size(1, rows_per_group=group, **arguments)
