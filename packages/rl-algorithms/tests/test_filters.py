from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.advantages.overlong import mask_overlong
from rl_algorithms.errors import NoLearningSignalError
from rl_algorithms.filters import (
    DynamicSamplingBuffer,
    mask_sequence_logprob_error,
    rows_with_variance,
)
from rl_distributed.batch.batched_data_dict import BatchedDataDict


def test_groups_without_variance():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.3, 0.3])
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    assert rows_with_variance(rewards, groups).tolist() == [True] * 2 + [False] * 4
    failed = torch.tensor([1, 0, 1, 1, 1, 1])
    assert not rows_with_variance(rewards, groups, failed).any()


def test_overlong_answers_leave_the_loss():
    mask, lost = mask_overlong(
        torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, False, True])
    )
    assert mask.tolist() == [0.0, 1.0, 0.0]
    assert lost == 1


def test_rows_whose_logprobs_disagree_leave_the_loss():
    sampler = torch.tensor([[0.0, -1.0], [0.0, -1.0], [0.0, math.nan]])
    trainer = torch.tensor([[9.0, -1.1], [0.0, -3.0], [0.0, -1.0]])
    mask, lost = mask_sequence_logprob_error(
        torch.ones(3), torch.tensor([[0, 1]] * 3), sampler, trainer, 1.5
    )
    assert mask.tolist() == [1.0, 0.0, 0.0]
    assert lost == 2


def test_the_disagreement_of_a_row_is_the_mean_over_its_own_tokens():
    trainer = torch.zeros(2, 8)
    sampler = torch.tensor([[0.0, 0.7] + [0.0] * 6, [0.0, *[0.7] * 7]])
    mask = (sampler != 0).float()
    # exp(0.7) is 2.01, however many of the row's tokens are untrained.
    found, lost = mask_sequence_logprob_error(
        torch.ones(2), mask, sampler, trainer, 1.9
    )
    assert (found.tolist(), lost) == ([0.0, 0.0], 2)
    _, lost = mask_sequence_logprob_error(torch.ones(2), mask, sampler, trainer, 2.1)
    assert lost == 0


def rows(*rewards: float) -> BatchedDataDict:
    """Return rows in groups of two."""
    count = len(rewards)
    return BatchedDataDict(
        {
            "rewards": torch.tensor(rewards),
            "group_index": torch.arange(count) // 2,
            "sample_mask": torch.ones(count),
            "texts": [str(reward) for reward in rewards],
            "input_ids": torch.ones(count, 2 + count, dtype=torch.int64),
        }
    )


def test_dynamic_sampling_fills_a_batch_over_several_generations():
    buffer = DynamicSamplingBuffer(4, 3, {"input_ids": 9})
    assert not buffer.add(rows(1, 0, 1, 1))
    assert buffer.add(rows(0, 0, 2, 1, 4, 3))
    batch, metrics = buffer.take()
    assert batch["rewards"].tolist() == [1, 0, 2, 1]
    assert batch["group_index"].tolist() == [0, 0, 2, 2]
    assert batch["input_ids"][0].tolist() == [1] * 6 + [9] * 2
    assert metrics == {
        "dynamic_sampling_num_gen_batches": 2.0,
        "dynamic_sampling_kept_rate": 0.6,
        "dynamic_sampling_num_discarded": 2.0,
    }
    assert buffer.num_gen_batches == 0
    assert not buffer.is_full


def test_dynamic_sampling_stops_after_exactly_the_allowed_batches():
    buffer = DynamicSamplingBuffer(4, 2)
    buffer.add(rows(1, 1))
    with pytest.raises(NoLearningSignalError, match=r"0 of 4 rows.* 2 generation"):
        buffer.add(rows(0, 0))
