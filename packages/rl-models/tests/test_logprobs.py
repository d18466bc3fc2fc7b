from __future__ import annotations

import pytest
import torch

from rl_models.ops.logprobs import (
    next_token_logprobs,
    token_logprobs,
)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_agree_with_float64(temperature):
    torch.manual_seed(0)
    logits = (torch.randn(40, 17) * 5).requires_grad_()
    targets = torch.randint(0, 17, (40,))
    weights = torch.randn(40)
    exact = logits.detach().double().requires_grad_()
    expected = torch.log_softmax(exact / temperature, -1)[torch.arange(40), targets]
    (expected * weights.double()).sum().backward()
    got = token_logprobs(logits, targets, temperature)
    (got * weights).sum().backward()
    torch.testing.assert_close(got.double(), expected, atol=4e-6, rtol=0)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=4e-6, rtol=1e-5)


def test_half_precision_logits_give_float32():
    logits = torch.randn(5, 7, dtype=torch.bfloat16, requires_grad=True)
    got = token_logprobs(logits, torch.zeros(5, dtype=torch.int64))
    assert got.dtype == torch.float32
    got.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_next_token_convention():
    logits = torch.randn(2, 4, 6)
    ids = torch.randint(0, 6, (2, 4))
    got = next_token_logprobs(logits, ids)
    assert got.shape == (2, 4)
    assert torch.equal(got[:, 0], torch.zeros(2))
    expected = torch.log_softmax(logits[1, 2], -1)[ids[1, 3]]
    torch.testing.assert_close(got[1, 3], expected)
