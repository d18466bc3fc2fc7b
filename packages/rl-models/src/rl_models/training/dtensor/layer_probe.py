"""Compare what a layer computes before and after it is cut between ranks.

A weight that is cut in the wrong place, or a gradient that is not added up, raises no
error: the model trains wrong. So a few tokens go through the first layer, forward and
backward, once while it is whole and once after it, or its input, is cut.
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
"""Number of tokens of a probe."""

# Rounding is about 1e-6 in float32, and 1e-4 on a GPU that multiplies in TF32; a wrong
# cut or a missing sum is off by tenths.
_TOLERANCE = 1e-2


class _CapturedError(Exception):
    """Ends a forward pass where the first layer begins."""


@dataclass(frozen=True)
class Probed:
    """Output and gradients of a layer."""

    output: Tensor
    """[1, T, H]"""
    input_gradient: Tensor
    """[1, T, H]"""
    gradients: Mapping[str, Tensor]
    """By the parameter's name in the layer."""


class LayerProbe:
    """Runs a few tokens through the first layer of a decoder.

    Args:
        base: The decoder, whole.
        layer: Its first layer.
        inputs: Arguments of the decoder; None: `NUM_TOKENS` tokens.
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
            # The same numbers on all ranks, without touching their random states.
            seeded = torch.Generator().manual_seed(0)
            weight = torch.randn(self._hidden().shape, generator=seeded)
        self.weight = weight
        """[1, T, H] factors of the output in the sum that is differentiated.

        A plain sum would hide errors that cancel each other.
        """

    def _hidden(self) -> Tensor:
        return _hidden_of(self._args, self._kwargs)

    def whole(self, layer: nn.Module) -> Probed:
        """Run a whole layer, which is not changed."""
        return self.ask(copy.deepcopy(layer), torch.device("cpu"))

    def ask(self, layer: nn.Module, device: torch.device, join: Any = None) -> Probed:
        """Run a layer, whose gradients are then None.

        Args:
            layer: The layer.
            device: Its device.
            join: Makes its output whole.
        """
        # Without dropout, which would draw other numbers.
        was_training = layer.training
        layer.eval()
        # A copy, so that every run accumulates its gradient in a tensor of its own.
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
        # Also for frozen weights: the gradients of all are compared.
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
    """Return the hidden states that a decoder passes to a layer.

    Args:
        base: The decoder; all layers before this one must have their weights.
        layer: The layer.
        inputs: Arguments of the decoder.
    """
    return _hidden_of(*_arguments(base, layer, inputs))


def _hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _arguments(
    base: Any, layer: nn.Module, inputs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that the decoder passes to the layer."""
    # Captured and not built, because masks and rotary embeddings differ by family.
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
    """Return [1, NUM_TOKENS] tokens for a probe."""
    size: int = base.get_input_embeddings().weight.shape[0]
    return torch.arange(1, NUM_TOKENS + 1)[None] % size


def check_differences(
    pairs: Mapping[str, tuple[Tensor, Tensor]], axis: str, what_for: str, name: str
) -> None:
    """Refuse a model whose first layer computes something else when it is shared.

    Args:
        pairs: The tensors found and wanted, by their description.
        axis: Key of `policy.parallelism`.
        what_for: The operation that is not possible, for the message.
        name: The model's name.

    Raises:
        UnsupportedModelError: A pair differs.
    """
    differences = {what: _largest_difference(*pair) for what, pair in pairs.items()}
    what, worst = max(differences.items(), key=lambda item: item[1])
    # Written so that NaN is refused too.
    if not worst < _TOLERANCE:
        raise UnsupportedModelError(
            f"policy.parallelism.{axis} cannot {what_for} {name}: in a check of its "
            f"first layer, {what} is off by {worst:.1e} of its largest number, more "
            f"than {_TOLERANCE:g}; set it to 1"
        )


def _largest_difference(found: Tensor, wanted: Tensor) -> float:
    """Largest difference of two tensors, relative to the largest wanted number."""
    # A gradient may be zero throughout, as that of a key's bias is by theory.
    scale = wanted.abs().max().clamp(min=1e-6)
    difference = (found.detach().cpu() - wanted.detach().cpu()).abs().max()
    return float(difference / scale.cpu())
