"""The loss that balances the load of the experts of a mixture, as in transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_models.errors import UnsupportedModelError
from rl_models.training.dtensor.experts import are_experts

__all__ = ["RouterLoss"]


class RouterLoss:
    """Collects the outputs of a model's routers, and computes their loss.

    Args:
        model: A Hugging Face causal LM, or a model with a scalar head.
        weight: Factor of the loss.
        num_alike: Number of ranks that compute the same loss, whose gradients are added
            up.
        name: The model's name, for the message.

    Raises:
        UnsupportedModelError: The model has no routers, or transformers no such loss.
    """

    def __init__(self, model: Any, weight: float, num_alike: int, name: str) -> None:
        self._weight, self._num_alike = weight, num_alike
        routers = [
            block.gate
            for block in model.modules()
            if any(are_experts(child) for child in block.children())
            and isinstance(getattr(block, "gate", None), nn.Module)
        ]
        home: Any = inspect.getmodule(type(model))
        self._function: Any = getattr(home, "load_balancing_loss_func", None)
        if not routers or self._function is None:
            raise UnsupportedModelError(
                f"policy.dtensor.router_loss_weight must be 0 with {name}: "
                f"{type(model).__name__} has no routers whose load transformers can "
                f"balance: got {weight:g}"
            )
        self._num_experts, self._top_k = routers[0].num_experts, routers[0].top_k
        self._logits: list[Tensor] | None = None
        self._last: tuple[tuple[Tensor, ...], Tensor | None] | None = None
        for router in routers:
            router.register_forward_hook(self._keep)

    def _keep(self, router: nn.Module, args: Any, output: Any) -> None:
        # Activation checkpointing computes layers again in the backward pass, where the
        # routers must not count twice.
        if self._logits is not None:
            self._logits.append(output[0])

    @contextmanager
    def watching(self, is_token: Tensor | None) -> Iterator[None]:
        """Watch the routers in a forward pass.

        Args:
            is_token: Whether each place of the input is a token, and not filled up;
                None: all are.
        """
        # Without gradients nobody takes the loss, and logits would be kept for nothing.
        if not torch.is_grad_enabled():
            yield
            return
        self._logits = []
        yield
        self._last, self._logits = (tuple(self._logits), is_token), None

    def take(self, share: Tensor) -> Tensor:
        """Return the loss of the last forward pass, weighted.

        Args:
            share: How much of a global batch the pass was, from 0 to 1.
        """
        assert self._last is not None
        logits, is_token = self._last
        self._last = None
        loss: Tensor = self._function(
            logits, self._num_experts, self._top_k, attention_mask=is_token
        )
        loss = loss * share.to(loss.device) * self._weight
        # The value stays whole for metrics, and only the gradient is divided.
        return loss.detach() + (loss - loss.detach()) / self._num_alike
