"""Log-probabilities of given tokens.

Letters in shapes: N positions, V vocabulary, B rows, S columns.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["next_token_logprobs", "token_logprobs"]


class _TokenLogprobs(torch.autograd.Function):
    """Saves the logits and one number per row, not the [N, V] log-softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: float) -> Tensor:
        # A sum over the vocabulary needs more than the 8 bits of bfloat16.
        scaled = logits.float()
        if scale != 1.0:
            scaled = scaled * scale
        log_sum = torch.logsumexp(scaled, dim=-1)
        chosen = scaled.gather(-1, targets[:, None]).squeeze(-1)
        ctx.save_for_backward(logits, targets, log_sum)
        ctx.scale = scale
        return chosen - log_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_sum = ctx.saved_tensors
        weight = (grads[0] * ctx.scale)[:, None]
        scaled = logits.float()
        if ctx.scale != 1.0:
            scaled = scaled * ctx.scale
        # d logprob / d logits = scale (onehot - softmax). The difference is a new
        # tensor, so changing it in place spares a second one of the size of the logits.
        grad = (scaled - log_sum[:, None]).exp_().mul_(-weight)
        grad.scatter_add_(-1, targets[:, None], weight)
        return grad.to(logits.dtype), None, None


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of one token per position.

    Args:
        logits: [N, V].
        targets: [N] int64 token ids.
        temperature: Divides the logits.

    Returns:
        [N] float32.
    """
    apply: Any = _TokenLogprobs.apply
    return cast(Tensor, apply(logits, targets, 1.0 / temperature))


def next_token_logprobs(
    logits: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return the log-probability of each token given the ones before it.

    Args:
        logits: [B, S, V]; those at position i predict token i + 1.
        input_ids: [B, S].
        temperature: Divides the logits.

    Returns:
        [B, S] float32 with 0.0 at position 0.
    """
    rows, columns = input_ids.shape
    flat = token_logprobs(
        logits[:, :-1].reshape(rows * (columns - 1), -1),
        input_ids[:, 1:].reshape(-1),
        temperature,
    )
    first = flat.new_zeros(rows, 1)
    return torch.cat([first, flat.view(rows, columns - 1)], dim=1)
