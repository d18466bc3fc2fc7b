"""Expert parallelism: each rank has some experts of a mixture, whole.

```
expert parallel:  tokens of this rank -> router -> [to the ranks of their experts]
                  -> experts -> [back] -> weighted sum -> tokens of this rank
tensor parallel:  tokens of all ranks -> router -> this rank's experts -> [sum]
```
Ranks of expert parallelism have different tokens; one all-to-all takes every token to
its experts, another one takes it back. Tensor-parallel ranks have the same tokens, and
each leaves out those for the others' experts. With both, a tensor-parallel rank shares
its experts with ranks that have other tokens, and exchanges what it has not left out.

Letters in shapes: N tokens, K experts of a token, M pairs of a token and an expert,
H hidden size, E experts of all ranks, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rl_models.errors import UnsupportedModelError
from rl_models.training.dtensor.collectives import RankGroup
from rl_models.training.dtensor.layer_probe import LayerProbe, Probed, check_differences
from rl_models.training.dtensor.weight_source import move

__all__ = [
    "EXPERT_WEIGHTS",
    "ExpertParallel",
    "are_experts",
    "own_experts",
    "probed",
    "through_experts",
]

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""Parameters of experts, the experts along dimension 0."""


def are_experts(module: nn.Module) -> bool:
    """Return whether a module holds all experts of a layer, as in transformers."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return names == set(EXPERT_WEIGHTS) and hasattr(module, "num_experts")


def probed(layers: Any) -> nn.Module:
    """Return the layer for a probe: the first one with experts, or else the first."""
    # Some mixtures begin with dense layers, which would not test the exchange.
    with_experts = (x for x in layers if any(map(are_experts, x.modules())))
    found: nn.Module = next(with_experts, layers[0])
    return found


def own_experts(experts: Any, rows_M_H: Tensor, expert_M: Tensor) -> Tensor:
    """Send each row through one of this rank's experts.

    Args:
        experts: The module, with this rank's experts.
        rows_M_H: Hidden states.
        expert_M: Index of the local expert of each row.
    """
    # An extra row of zeros: without any token the experts would get no gradient, and
    # the ranks that share them would wait for it in their collective.
    rows = torch.cat([rows_M_H, rows_M_H.new_zeros(1, rows_M_H.shape[1])])
    index = torch.cat([expert_M, expert_M.new_zeros(1)])[:, None]
    # Weights of the router are applied later, by the rank that has the token.
    once = torch.ones_like(index, dtype=rows.dtype)
    computed: Tensor = type(experts).forward(experts, rows, index, once)
    return computed[:-1]


def through_experts(experts: Any, rows_M_H: Tensor, expert_M: Tensor) -> Tensor:
    """Send each row through an expert of this rank, or of those that share them.

    Args:
        experts: The module.
        rows_M_H: Hidden states.
        expert_M: Number of each row's expert among those of these ranks.
    """
    exchange = getattr(experts, "exchanged", None)
    compute = own_experts if exchange is None else exchange
    found: Tensor = compute(experts, rows_M_H, expert_M)
    return found


class ExpertParallel:
    """Distributes the experts of a model over ranks with different tokens.

    Args:
        model: A Hugging Face causal LM, or a model with a scalar head, unsharded.
        layers: Its decoder layers.
        ranks: Ranks that share the experts.
        device: Device of the computation.
        name: The model's name, for messages.
        ask_cut: Runs a probe through a layer that is cut between tensor-parallel
            ranks; None: layers are whole.

    Raises:
        UnsupportedModelError: The model has no experts, or keeps them in an unknown
            way.
    """

    def __init__(
        self,
        model: Any,
        layers: list[nn.Module],
        ranks: RankGroup,
        device: torch.device,
        name: str,
        ask_cut: Callable[[nn.Module], Probed] | None = None,
    ) -> None:
        self.ranks = ranks
        self.modules: list[Any] = [m for m in model.modules() if are_experts(m)]
        if not self.modules:
            raise UnsupportedModelError(
                f"policy.parallelism.expert cannot share the experts of {name}: "
                f"{type(model).__name__} has none as transformers keeps those of "
                "Mixtral and Qwen3-MoE; set it to 1"
            )
        layer = probed(layers)
        # Asked before the experts are distributed in place.
        if ask_cut is not None:
            ask = partial(ask_cut, layer)
            wanted = ask()
        else:
            probe = LayerProbe(model.base_model, layer)
            ask = partial(probe.ask, layer, device)
            wanted = probe.whole(layer)
        for experts in self.modules:
            self._deal_out(experts, is_cut=ask_cut is not None)
        cut = {id(getattr(m, key)) for m in self.modules for key in EXPERT_WEIGHTS}
        move(model, device)
        self._names = {n for n, p in model.named_parameters() if id(p) in cut}
        self._compare(ask(), wanted, layer, name)

    def has(self, name: str) -> bool:
        """Whether a parameter is of experts."""
        return name in self._names

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a parameter, of each rank's part; collective."""
        return self.ranks.joined(part, 0) if self.has(name) else part

    def _deal_out(self, experts: Any, *, is_cut: bool) -> None:
        size, rank = self.ranks.size, self.ranks.rank
        for key in EXPERT_WEIGHTS:
            whole = getattr(experts, key)
            # A copy, so that the memory of the whole weight can be freed.
            own = whole.detach().chunk(size)[rank].clone()
            parameter = nn.Parameter(own, requires_grad=whole.requires_grad)
            setattr(experts, key, parameter)
        # transformers' forward pass reads this number.
        experts.num_experts //= size
        experts.exchanged = self._exchanged
        if not is_cut:
            # Else the forward pass is that of tensor-parallel ranks.
            experts.forward = MethodType(self._weighted, experts)

    def _weighted(
        self, experts: Any, hidden_N_H: Tensor, expert_N_K: Tensor, weight_N_K: Tensor
    ) -> Tensor:
        expert_M = expert_N_K.reshape(-1)
        # Sorted by expert, and thereby by rank. Stable, so that tokens of an expert
        # keep their order and sums their rounding.
        order_M = expert_M.argsort(stable=True)
        token_M = order_M // expert_N_K.shape[1]
        back = self._exchanged(experts, hidden_N_H[token_M], expert_M[order_M])
        weighted = back * weight_N_K.reshape(-1)[order_M][:, None]
        # Added up in the type of the products, and rounded once.
        zeros = weighted.new_zeros(hidden_N_H.shape)
        return zeros.index_add(0, token_M, weighted).to(hidden_N_H.dtype)

    def _exchanged(self, experts: Any, rows_M_H: Tensor, expert_M: Tensor) -> Tensor:
        """Send rows, sorted by expert, to the ranks of their experts and back."""
        size, per_rank = self.ranks.size, experts.num_experts
        counts = expert_M.bincount(minlength=size * per_rank).view(size, per_rank)
        # Counts first: a rank must know how much to receive.
        arriving = self.ranks.exchanged(counts)
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = self.ranks.exchange(rows_M_H, sent, received)
        own = torch.arange(per_rank, device=rows.device).repeat(size)
        computed = own_experts(experts, rows, own.repeat_interleave(arriving.flatten()))
        return self.ranks.exchange(computed, received, sent)

    def _compare(
        self, found: Probed, wanted: Probed, layer: nn.Module, name: str
    ) -> None:
        pairs = {
            "its output": (found.output, wanted.output),
            "the gradient of its input": (found.input_gradient, wanted.input_gradient),
        }
        cut = {id(getattr(m, key)) for m in self.modules for key in EXPERT_WEIGHTS}
        for key, parameter in layer.named_parameters():
            gradient, whole = found.gradients[key], wanted.gradients[key]
            if id(parameter) in cut:
                # In the probe every rank sends the same tokens, so they count R times.
                gradient = gradient / self.ranks.size
                whole = whole.chunk(self.ranks.size)[self.ranks.rank]
            pairs[f"the gradient of {key}"] = (gradient, whole)
        check_differences(pairs, "expert", "share the experts of", name)
