"""Gradients of a rank: its parts of them, and their norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from rl_models.training.dtensor.sharding import local_part
from rl_models.training.process_group import Ranks

__all__ = ["gradient_norm", "local_gradients"]


def local_gradients(parameters: Mapping[str, nn.Parameter]) -> Iterator[Tensor]:
    """Yield this rank's part of each gradient."""
    return (local_part(p.grad) for p in parameters.values() if p.grad is not None)


def gradient_norm(
    parameters: Mapping[str, nn.Parameter],
    ranks: Ranks,
    num_holders: Callable[[str], int] = lambda name: 1,
) -> float:
    """Return the 2-norm of all gradients together, over all ranks.

    Args:
        parameters: Parameters of this rank.
        ranks: All ranks.
        num_holders: Returns the number of ranks that hold the same part of a parameter.
    """
    # Not torch's `clip_grad_norm_`: it fails on tensors that are partly DTensors, and
    # does not know of parts that tensor-parallel ranks hold alike.
    by_holders: dict[int, list[Tensor]] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradient = local_part(parameter.grad)
            if gradient.numel():
                by_holders.setdefault(num_holders(name), []).append(gradient)
    square = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for count, gradients in by_holders.items():
        norms = torch.stack(torch._foreach_norm(gradients))
        # The sum over all ranks counts a part as often as it is held. In float64,
        # because squares of many norms are added.
        square += norms.to(ranks.device).double().square().sum() / count
    return math.sqrt(ranks.sum(square).item())
