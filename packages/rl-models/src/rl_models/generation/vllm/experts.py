"""Experts as vLLM loads them: one tensor each, by the names of the family's files.

The trainer sends all experts of a layer in two tensors, as in transformers' models:
`experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I] (E experts, I
columns, H hidden size).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["experts_apart"]

_FUSED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
# Mixtral's files have names of their own for the block, its router and the matrices.
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def experts_apart(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield experts one by one, and all other tensors as they are.

    Args:
        model: The vLLM model that loads them.
        tensors: Tensors as they were sent.
    """
    # Asked of the model and not of the names: transformers gives all families of
    # mixtures the names of one, vLLM keeps Mixtral's own.
    is_mixtral = any(".block_sparse_moe." in name for name, _ in model.named_modules())
    for name, tensor in tensors:
        if is_mixtral and name.endswith(".mlp.gate.weight"):
            yield name.replace(".mlp.gate.", ".block_sparse_moe.gate."), tensor
        elif tensor.ndim == 3 and name.endswith(_FUSED):
            home, _, leaf = name.rpartition(".")
            parts = {"down_proj": tensor}
            if leaf == "gate_up_proj":
                gate, up = tensor.chunk(2, dim=1)
                parts = {"gate_proj": gate, "up_proj": up}
            if is_mixtral:
                home = home.replace(".mlp.", ".block_sparse_moe.")
            for part, experts in parts.items():
                own = _MIXTRAL[part] if is_mixtral else part
                for number, expert in enumerate(experts):
                    yield f"{home}.{number}.{own}.weight", expert
        else:
            yield name, tensor
