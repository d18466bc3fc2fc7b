"""Divergences of two distributions given as log-probs, over the last dimension.

With the teacher's p, the student's q and a weight w (arXiv:2306.13649, section 2):

```
forward   KL(p || q)
reverse   KL(q || p)
mixed     w KL(p || q) + (1 - w) KL(q || p)
jsd       w KL(p || m) + (1 - w) KL(q || m),   m = w p + (1 - w) q
```

Shapes: N positions, k tokens, E events.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_algorithms.losses.distillation_config import KLDirection

__all__ = ["divergence", "divergence_outside", "with_bucket"]

_LOG_ZERO = -100.0
"""Finite stand-in for the logarithm of a probability of 0."""
_TINY = 1e-8
"""Lower bound of the total probability of all tokens outside the top k."""


def divergence(p: Tensor, q: Tensor, kind: KLDirection, weight: float) -> Tensor:
    """Return the [N] divergence of [N, E] log-probs."""
    if kind == "forward":
        return _kl(p, q)
    if kind == "reverse":
        return _kl(q, p)
    if kind == "mixed":
        return weight * _kl(p, q) + (1 - weight) * _kl(q, p)
    # The logarithm of the mixture, without leaving log space, where exp could
    # underflow.
    middle = torch.logaddexp(p + math.log(weight), q + math.log1p(-weight))
    return weight * _kl(p, middle) + (1 - weight) * _kl(q, middle)


def divergence_outside(
    q: Tensor, entropy: Tensor | None, kind: KLDirection, weight: float
) -> Tensor | float:
    """Return [N], the contribution of the events outside of [N, E], where p is 0.

    The reverse divergence would be infinite, so it uses e^-100 in place of 0.

    Args:
        q: [N, E] log-probs of the listed events; their probabilities sum to less
            than 1.
        entropy: [N] entropy of q over all events, for `reverse` and `mixed`.
        kind: The divergence.
        weight: Weight of the forward part.
    """
    if kind == "forward":
        return 0.0
    probability = 1 - q.exp().sum(-1)
    if kind == "jsd":
        # Outside, p is 0 and the mixture is (1 - w) q, so log q - log m is constant.
        return -(1 - weight) * math.log1p(-weight) * probability
    assert entropy is not None
    # What the listed events contribute to minus the entropy; the remainder lies
    # outside.
    inside = (q.exp() * q).sum(-1)
    share = 1.0 if kind == "reverse" else 1 - weight
    return share * (-entropy - inside - _LOG_ZERO * probability)


def with_bucket(logprobs: Tensor) -> Tensor:
    """Return [N, k + 1] from [N, k], adding an event for all other tokens together."""
    # Rounding can leave 0 or less, whose logarithm would be -inf or NaN.
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_TINY)
    return torch.cat([logprobs, rest.log()], dim=-1)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Return [N], KL(a || b)."""
    return (a.exp() * (a - b)).sum(-1)
