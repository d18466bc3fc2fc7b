"""The steps of one rank's optimizer: clipped, scheduled, and skipped if not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from rl_models.config import PolicyConfig
from rl_models.errors import NonFiniteGradientError
from rl_models.training.optimizer import (
    build_optimizer,
    build_scheduler,
    change_settings,
)

__all__ = ["OptimizerSteps", "SkippedSteps", "clip_gradients"]


class OptimizerSteps:
    """Takes the optimizer steps of a rank, which all ranks take or skip together.

    Args:
        config: Its sections `optimizer` and `scheduler`, `max_grad_norm` and
            `max_skipped_steps`.
        parameters: What this rank trains, by name.
        device: Where it is.
    """

    def __init__(
        self,
        config: PolicyConfig,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
    ) -> None:
        self.optimizer = build_optimizer(config.optimizer, parameters, device)
        self.scheduler = build_scheduler(config.scheduler, self.optimizer)
        self.skipped = SkippedSteps(config.max_skipped_steps)
        self._max_norm = config.max_grad_norm

    def take(self, norm: float, gradients: Iterable[Tensor]) -> bool:
        """Clip and step; a gradient that is inf or nan changes nothing.

        Args:
            norm: Norm of the gradients over all ranks: the same on each, so that all
                of them skip the step or none does.
            gradients: This rank's parts of them.

        Returns:
            Whether the step was taken.

        Raises:
            NonFiniteGradientError: Too many steps in a row must be skipped.
        """
        is_finite = self.skipped.is_finite(norm)
        if is_finite:
            clip_gradients(gradients, norm, self._max_norm)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        return is_finite

    def change(self, settings: Mapping[str, float]) -> None:
        """Change settings of the optimizer; see `TrainingPolicy.change_optimizer`."""
        change_settings(self.optimizer, self.scheduler, settings)


def clip_gradients(
    gradients: Iterable[Tensor], norm: float, max_norm: float | None
) -> None:
    """Scale gradients of this global norm down to `max_norm`."""
    if max_norm is None or norm <= max_norm:
        return
    # The same small number as in torch's `clip_grad_norm_`, so that results agree with
    # it.
    torch._foreach_mul_(list(gradients), max_norm / (norm + 1e-6))


class SkippedSteps:
    """Counts optimizer steps in a row whose gradient was inf or nan.

    Args:
        limit: `policy.max_skipped_steps`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def is_finite(self, norm: float) -> bool:
        """Return whether a step with this gradient norm may be taken.

        Raises:
            NonFiniteGradientError: Too many steps in a row must be skipped.
        """
        is_finite = math.isfinite(norm)
        self._in_a_row = 0 if is_finite else self._in_a_row + 1
        if self._in_a_row > self._limit:
            raise NonFiniteGradientError(
                f"the gradient norm was {norm} in {self._in_a_row} optimizer "
                "steps in a row (policy.max_skipped_steps is "
                f"{self._limit}); lower policy.optimizer.kwargs.lr "
                "or look for inf and nan in the loss and its inputs"
            )
        return is_finite
