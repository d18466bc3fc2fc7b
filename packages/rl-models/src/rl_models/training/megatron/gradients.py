"""Gradients of a rank: their sum over ranks, and their norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rl_models.training.megatron.model import EMBEDDING, MegatronModel

__all__ = ["gradient_norm", "gradients_of", "sum_gradients"]


def sum_gradients(model: MegatronModel) -> None:
    """Add up partial gradients over the ranks.

    A sum and not a mean, because losses are divided by global counts already.
    """
    gradients = model.masters.gradients()
    partial = [gradients[name] for name in model.sums_over_tensor_ranks]
    _reduce(partial, model.layout.sum_over_tensor)
    _sum_tied(model, gradients)
    model.masters.reduce(gradients)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _reduce(gradients: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> None:
    """Reduce gradients with a single call for all of them."""
    if not gradients:
        return
    flat = reduce(torch.cat([gradient.flatten() for gradient in gradients]))
    at = 0
    for gradient in gradients:
        size = gradient.numel()
        gradient.copy_(flat[at : at + size].view_as(gradient))
        at += size


def _sum_tied(model: MegatronModel, gradients: Mapping[str, Tensor]) -> None:
    """Add the gradients of a tied embedding on the first and on the last stage."""
    layout = model.layout
    if layout.num_stages == 1 or not model.config.tie_word_embeddings:
        return
    name = EMBEDDING if layout.is_first_stage else model.embedding_copy
    if name is not None:
        group = parallel_state.get_embedding_group()
        dist.all_reduce(gradients[name], group=group)


def gradient_norm(model: MegatronModel) -> float:
    """Return the 2-norm of all gradients together, each number counted once."""
    layout = model.layout
    squares = torch.zeros(2, dtype=torch.float64, device=layout.device)
    for name, parameter in model.masters.parameters.items():
        entry = model.entries.get(name)
        if entry is None:  # a tied copy, which the first stage counts
            continue
        # Held alike by all tensor ranks: the first one counts it.
        if entry.kind == "whole" and layout.tensor_rank > 0:
            continue
        norm = torch.linalg.vector_norm(_grad(parameter))
        squares[int(entry.is_of_experts)] += norm.double().square()
    dense, experts = squares[:1], squares[1:]
    if model.masters.is_shared:
        layout.sum_over_alike(dense, of_experts=False)
        layout.sum_over_alike(experts, of_experts=True)
    total = layout.sum_over_model(dense) + layout.sum_over_experts(experts)
    return math.sqrt(total.item())


def gradients_of(model: MegatronModel) -> Iterator[Tensor]:
    """Yield the gradients of this rank's masters."""
    return (_grad(parameter) for parameter in model.masters.parameters.values())
