"""What a layer computes, asked before and after it is cut between ranks.

A weight that is cut in the wrong place, or a gradient that is not added up, raises
nothing: the model trains wrong. So a few tokens go through the first layer, forward and
backward, once while it is whole and once when it is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = ["LayerProbe", "Probed", "largest_difference"]

_NUM_TOKENS = 8


class _CapturedError(Exception):
    """Ends a forward pass where the first layer begins."""


@dataclass(frozen=True)
class Probed:
    """What a layer gave."""

    output: Tensor
    """[1, T, H]"""
    input_gradient: Tensor
    """[1, T, H]"""
    gradients: Mapping[str, Tensor]
    """By the parameter's name in the layer."""


class LayerProbe:
    """A few tokens on their way into the first layer of a decoder.

    Args:
        base: The decoder, whole.
        layer: Its first layer.
    """

    def __init__(self, base: Any, layer: nn.Module) -> None:
        self._args, self._kwargs = _arguments(base, layer)
        self._weight = torch.randn(
            self._hidden().shape, generator=torch.Generator().manual_seed(0)
        )

    def _hidden(self) -> Tensor:
        found: Tensor = self._args[0] if self._args else self._kwargs["hidden_states"]
        return found

    def whole(self, layer: nn.Module) -> Probed:
        """Ask a whole layer, which is left as it is."""
        return self.ask(copy.deepcopy(layer), torch.device("cpu"))

    def ask(self, layer: nn.Module, device: torch.device, join: Any = None) -> Probed:
        """Ask a layer, whose gradients are then none.

        Args:
            layer: Which.
            device: Where it is.
            join: Makes its output whole.
        """
        was_training = layer.training
        layer.eval()
        hidden = self._hidden().to(device).requires_grad_()
        args, kwargs = tree_map(
            lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf,
            (self._args[1:], self._kwargs),
        )
        if self._args:
            args = (hidden, *args)
        else:
            kwargs["hidden_states"] = hidden
        needed = {n: p.requires_grad for n, p in layer.named_parameters()}
        layer.requires_grad_(True)
        output = layer(*args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        output = output if join is None else join(output)
        (output * self._weight.to(device)).sum().backward()
        gradients = {}
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            gradients[name], parameter.grad = parameter.grad, None
            parameter.requires_grad_(needed[name])
        layer.train(was_training)
        assert hidden.grad is not None
        return Probed(output.detach().cpu(), hidden.grad.cpu(), gradients)


def _arguments(base: Any, layer: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the decoder hands its first layer for a few tokens."""
    found: list[Any] = []

    def capture(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((args, dict(kwargs)))
        raise _CapturedError

    hook = layer.register_forward_pre_hook(capture, with_kwargs=True)
    size = base.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, _NUM_TOKENS + 1)[None] % size
    try:
        with torch.no_grad():
            base(input_ids=tokens, use_cache=False)
    except _CapturedError:
        pass
    finally:
        hook.remove()
    args, kwargs = found[0]
    return args, kwargs


def largest_difference(found: Tensor, wanted: Tensor) -> float:
    """Largest difference of two tensors, relative to the largest wanted number."""
    scale = wanted.abs().max().clamp(min=1e-6)
    difference = (found.detach().cpu() - wanted.detach().cpu()).abs().max()
    return float(difference / scale.cpu())
