from __future__ import annotations

import pytest
import torch

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.nll import NLLLossFn
from rl_distributed.metrics.values import Sum
from rl_models.interfaces import LossFunction


def batch():
    return {
        "token_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]),
        "sample_mask": torch.tensor([1.0, 0.0]),
    }


def test_mean_over_the_trained_tokens_of_the_global_batch():
    logprobs = torch.tensor(
        [[-9.0, -1.0, -2.0], [-3.0, -4.0, -9.0]], requires_grad=True
    )
    loss, metrics = NLLLossFn()(
        batch(), torch.tensor(3), torch.tensor(4.0), next_token_logprobs=logprobs
    )
    loss.backward()
    assert loss.item() == pytest.approx(3 / 4)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0, -0.25, -0.25], [0, 0, 0]]
    assert metrics["loss"] == Sum(0.75)
    assert metrics["num_unmasked_tokens"] == Sum(2.0)
    assert metrics["num_valid_samples"] == Sum(1.0)


def test_an_empty_batch_has_loss_zero():
    data = batch() | {"sample_mask": torch.zeros(2)}
    logprobs = torch.full((2, 3), -torch.inf, requires_grad=True)
    loss, _ = NLLLossFn()(
        data, torch.tensor(0), torch.tensor(0), next_token_logprobs=logprobs
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


def test_it_is_a_loss_function_and_says_what_is_missing():
    loss_fn = NLLLossFn()
    assert isinstance(loss_fn, LossFunction)
    one = torch.tensor(1)
    for name in ("logits", "next_token_logits", "next_token_logprobs"):
        with pytest.raises(LossInputError, match=rf"no logits: got {name} \[2, 4, 5\]"):
            loss_fn(batch(), one, one, **{name: torch.zeros(2, 4, 5)})
    with pytest.raises(LossInputError, match="next_token_logprobs: got values"):
        loss_fn(batch(), one, one, values=torch.zeros(2, 4))
    with pytest.raises(LossInputError, match="'token_mask' of the batch is missing"):
        loss_fn(
            {"sample_mask": torch.ones(2)},
            one,
            one,
            next_token_logprobs=torch.zeros(2, 3),
        )
    with pytest.raises(LossInputError, match=r"must be \[B, S\] = \[2, 6\]"):
        loss_fn(batch(), one, one, next_token_logprobs=torch.zeros(2, 5))
