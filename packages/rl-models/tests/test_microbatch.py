from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_distributed.batched_data_dict import BatchedDataDict
from rl_models.ops.varlen_attention import ATTENTION_NAME
from rl_models.training.dtensor.microbatch import (
    MicroBatchRows,
    ModelBatch,
    micro_batch_rows,
    narrowed,
)

CPU = torch.device("cpu")


@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 2**32), st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_needed_position_reads_its_own_prefix(rows, width, seed, packed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    ids = torch.arange(rows * width).view(rows, width)
    needed = torch.rand(rows, width - 1, generator=generator) < 0.4
    batch = ModelBatch.for_logprobs(
        ids, needed, CPU, ATTENTION_NAME if packed else None
    )
    fed = batch.inputs["input_ids"].reshape(-1)
    row, column = needed.nonzero(as_tuple=True)
    # The token under each position is the one before the target, of the same row.
    assert torch.equal(fed[batch.positions], ids[row, column])
    assert torch.equal(batch.targets, ids[row, column + 1])
    spread = batch.spread(batch.targets.float())
    expected = torch.where(needed, ids[:, 1:].float(), torch.zeros(()))
    assert torch.equal(spread, expected)


def test_nothing_after_the_last_needed_token_is_computed():
    ids = torch.arange(40).view(4, 10)
    needed = torch.zeros(4, 9, dtype=torch.bool)
    needed[0, 1] = needed[2, 7] = True
    batch = ModelBatch.for_logprobs(ids, needed, CPU, ATTENTION_NAME)
    assert batch.inputs["input_ids"].tolist() == [[0, 1, *range(20, 28)]]
    assert batch.positions.tolist() == [1, 9]


def test_a_batch_that_needs_nothing_still_makes_one_pass():
    ids = torch.zeros(2, 4, dtype=torch.int64)
    needed = torch.zeros(2, 3, dtype=torch.bool)
    batch = ModelBatch.for_logprobs(ids, needed, CPU, ATTENTION_NAME)
    assert batch.inputs["input_ids"].shape == (1, 1)
    assert batch.positions.numel() == 0


def test_rows_of_nearly_equal_length_stay_a_rectangle():
    ids = torch.arange(60).view(6, 10)
    needed = torch.zeros(6, 9, dtype=torch.bool)
    needed[:, 7] = needed[0, 8] = True
    batch = ModelBatch.for_logprobs(ids, needed, CPU, ATTENTION_NAME)
    assert batch.inputs["input_ids"].shape == (1, 54)


def test_plans_are_followed_and_columns_narrowed():
    data = BatchedDataDict(
        input_ids=torch.zeros(5, 8, dtype=torch.int64),
        other=torch.zeros(5),
        texts=list("abcde"),
    )
    lengths = np.array([3, 5, 2, 8, 1])
    plain = list(micro_batch_rows(data, lengths, 2))
    assert [(m.start, m.stop, m.width) for m in plain] == [
        (0, 2, 5),
        (2, 4, 8),
        (4, 5, 2),
    ]
    data.micro_batch_indices = [[[0, 3], [3, 5]]]
    assert [m.stop for m in micro_batch_rows(data, lengths, 2)] == [3, 5]
    part = narrowed(data, MicroBatchRows(0, 2, 5), 8)
    assert part["input_ids"].shape == (2, 5)
    assert part["texts"] == ["a", "b"]
