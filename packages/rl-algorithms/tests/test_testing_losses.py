"""The kit passes correct losses; `test_testing_mutants.py` shows what it fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_algorithms.losses import NLLLossFn
from rl_algorithms.testing import (
    LOSS_CHECKS,
    ConformanceError,
    LossBatch,
    check_loss,
    token_batch,
)


def negative_log_likelihood(data, inputs, held):
    """Compute the mean over all valid tokens, row by row."""
    total, count = 0.0, 0
    for row in range(len(data["sample_mask"])):
        for t in range(data["token_mask"].shape[1] - 1):
            if data["token_mask"][row, t + 1] and data["sample_mask"][row]:
                total = total - inputs["next_token_logprobs"][row, t]
                count += 1
    return total / count


def test_the_likelihood_of_demonstrations_passes():
    check_loss(NLLLossFn(), token_batch, negative_log_likelihood)


class Pairs:
    """A Bradley-Terry loss without tokens, to show what the kit requires of these."""

    def __call__(self, data: Any, num_seqs: Any, num_toks: Any, *, scores: Any):
        chosen, rejected = scores[::2], scores[1::2]
        loss = -torch.nn.functional.logsigmoid(chosen - rejected)
        kept = torch.where(data["sample_mask"][::2] != 0, loss, 0.0)
        return 2 * kept.sum() / num_seqs.clamp(min=1), {"num_pairs": float(len(chosen))}


def pairs(seed: int) -> LossBatch:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(8, generator=generator, dtype=torch.float64)
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.float64)
    return LossBatch({"sample_mask": mask}, {"scores": scores}, rows_per_unit=2)


def bradley_terry(data, inputs, held):
    scores = inputs["scores"]
    terms = [
        torch.log(1 + torch.exp(scores[i + 1] - scores[i]))
        for i in range(0, 8, 2)
        if data["sample_mask"][i]
    ]
    return sum(terms) / len(terms)


def test_pairs_stay_together():
    check_loss(Pairs(), pairs, bradley_terry, compare_metrics=False)
    with pytest.raises(ConformanceError, match="metric 'num_pairs' depends on the"):
        check_loss(Pairs(), pairs, bradley_terry, checks=["data_parallel"])


def test_the_error_names_the_check():
    with pytest.raises(ConformanceError, match="value: the loss is not that") as caught:
        check_loss(NLLLossFn(), token_batch, lambda data, inputs, held: 0.0)
    assert caught.value.check == "value"
    assert LOSS_CHECKS[0] == "value"


def test_batches_can_be_cut_padded_and_cast():
    batch = token_batch(3)
    wide = batch.with_width(14, 7.0)
    assert wide.width == 14
    assert wide.inputs["next_token_logprobs"].shape == (6, 13)
    assert wide.data["prev_logprobs"][0, -1] == 7.0
    assert not wide.data["token_mask"][:, 9:].any()
    assert torch.equal(
        wide.with_width(9).data["prev_logprobs"], batch.data["prev_logprobs"]
    )
    assert batch.cast(torch.float32).data["advantages"].dtype == torch.float32
    assert [int(count) for count in wide.counts()] == [int(c) for c in batch.counts()]
