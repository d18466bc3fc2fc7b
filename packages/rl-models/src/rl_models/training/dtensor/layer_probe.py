"""What a layer computes, asked before and after it is cut between ranks.

A weight that is cut in the wrong place, or a gradient that is not added up, raises
nothing: the model trains wrong. So a few tokens go through the first layer, forward and
backward, once while it is whole and once when it, or what goes through it, is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rl_models.errors import UnsupportedModelError

__all__ = [
    "NUM_TOKENS",
    "LayerProbe",
    "Probed",
    "check_differences",
    "input_of_layer",
    "probe_tokens",
]

NUM_TOKENS = 8
"""Tokens of a probe."""

# Rounding is some 1e-6 in float32 and 1e-4 where a GPU multiplies in TF32; what is cut
# or added up wrongly is off by tenths.
_TOLERANCE = 1e-2


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
        inputs: What the decoder is given; None: `NUM_TOKENS` tokens.
        weight: As `weight`; None: random numbers.
    """

    def __init__(
        self,
        base: Any,
        layer: nn.Module,
        inputs: Mapping[str, Any] | None = None,
        weight: Tensor | None = None,
    ) -> None:
        self._args, self._kwargs = _arguments(base, layer, inputs)
        if weight is None:
            seeded = torch.Generator().manual_seed(0)
            weight = torch.randn(self._hidden().shape, generator=seeded)
        self.weight = weight
        """[1, T, H] what the output is weighted with, for its gradient."""

    def _hidden(self) -> Tensor:
        return _hidden_of(self._args, self._kwargs)

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
        # A copy: the gradient of another layer must not be in the same tensor.
        hidden = self._hidden().detach().to(device, copy=True).requires_grad_()
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
        (output * self.weight.to(device)).sum().backward()
        gradients = {}
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            gradients[name], parameter.grad = parameter.grad, None
            parameter.requires_grad_(needed[name])
        layer.train(was_training)
        assert hidden.grad is not None
        return Probed(output.detach().cpu(), hidden.grad.cpu(), gradients)


def input_of_layer(base: Any, layer: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states that a layer is given by its decoder.

    Args:
        base: The decoder; no layer before this one may lack its weights.
        layer: Which.
        inputs: What the decoder is given.
    """
    return _hidden_of(*_arguments(base, layer, inputs))


def _hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _arguments(
    base: Any, layer: nn.Module, inputs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the decoder hands its first layer for a few tokens."""
    found: list[Any] = []

    def capture(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((args, dict(kwargs)))
        raise _CapturedError

    hook = layer.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        with torch.no_grad():
            base(**(inputs or {"input_ids": probe_tokens(base)}), use_cache=False)
    except _CapturedError:
        pass
    finally:
        hook.remove()
    args, kwargs = found[0]
    return args, kwargs


def probe_tokens(base: Any) -> Tensor:
    """[1, NUM_TOKENS] tokens of a probe."""
    size: int = base.get_input_embeddings().weight.shape[0]
    return torch.arange(1, NUM_TOKENS + 1)[None] % size


def check_differences(
    pairs: Mapping[str, tuple[Tensor, Tensor]], axis: str, what_for: str, name: str
) -> None:
    """Refuse a model whose first layer is another one when it is shared.

    Args:
        pairs: By what they are, what was found and what was wanted.
        axis: Of `policy.parallelism`.
        what_for: What cannot be done with the model, for the message.
        name: The model's name.

    Raises:
        UnsupportedModelError: A pair differs.
    """
    differences = {what: _largest_difference(*pair) for what, pair in pairs.items()}
    what, worst = max(differences.items(), key=lambda item: item[1])
    if not worst < _TOLERANCE:
        raise UnsupportedModelError(
            f"policy.parallelism.{axis} cannot {what_for} {name}: in a check of its "
            f"first layer, {what} is off by {worst:.1e} of its largest number, more "
            f"than {_TOLERANCE:g}; set it to 1"
        )


def _largest_difference(found: Tensor, wanted: Tensor) -> float:
    """Largest difference of two tensors, relative to the largest wanted number."""
    scale = wanted.abs().max().clamp(min=1e-6)
    difference = (found.detach().cpu() - wanted.detach().cpu()).abs().max()
    return float(difference / scale.cpu())
