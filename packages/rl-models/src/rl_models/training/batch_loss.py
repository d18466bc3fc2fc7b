"""A loss for backends with six methods: from rows and outputs to a single number."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_distributed.errors import BatchError
from rl_models.errors import UnsupportedModelError
from rl_models.interfaces import LossFunction
from rl_models.loss_traits import LossTraits
from rl_models.training.global_batch import num_trained
from rl_models.training.global_loss import Metrics, add_metrics
from rl_models.types import (
    LossInputType,
    TrainingRows,
)

__all__ = ["BatchLoss"]

_OUTPUTS = {
    LossInputType.LOGPROB: "[B, S] log-probs as get_logprobs gives them",
    LossInputType.LOGIT: "[B, S, V] logits",
    LossInputType.VALUE: "[B, S] values",
}


class BatchLoss:
    """A loss that knows the counts by which its global batch is divided.

    ```python
    loss = loss_fn(batch, logprobs)  # logprobs: [B, S], with gradients
    loss.backward()
    ```

    The losses of parts of the batch add up to that of the batch, so a backend may call
    it for one micro-batch after the other.

    Args:
        loss_fn: The algorithm's loss.
        batch: The global batch.
    """

    def __init__(self, loss_fn: LossFunction, batch: TrainingRows) -> None:
        self.loss_fn = loss_fn
        self.input_type = LossTraits.of(loss_fn).input_type
        """Its input; see `LossInputType`."""
        self.metrics: Metrics = {}
        """Metrics of the loss, one per call."""
        self.was_called = False
        self._num_rows, self._num_tokens = num_trained(batch).float()

    def __call__(self, batch: TrainingRows, outputs: Tensor) -> Tensor:
        """Return the share of some rows in the loss of the global batch.

        Args:
            batch: The global batch, or a part of its rows.
            outputs: Outputs of the model: by `input_type` log-probs as returned by
                `get_logprobs` (the default), logits or values.

        Raises:
            BatchError: The outputs have another shape.
            UnsupportedModelError: The loss needs more than one tensor.
        """
        inputs = self._inputs(batch, outputs)
        self.was_called = True
        loss, metrics = self.loss_fn(batch, self._num_rows, self._num_tokens, **inputs)
        add_metrics(self.metrics, metrics)
        return loss

    def _inputs(self, batch: TrainingRows, outputs: Tensor) -> dict[str, Tensor]:
        kind = self.input_type
        if kind not in _OUTPUTS:
            raise UnsupportedModelError(
                f"{type(self.loss_fn).__name__} is computed from {kind.value}, "
                "which a training backend of six methods cannot give; use the backend "
                "dtensor"
            )
        shape = tuple(batch["input_ids"].shape)
        if not isinstance(outputs, Tensor) or tuple(outputs.shape[:2]) != shape:
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else outputs
            raise BatchError(
                f"loss_fn(batch, outputs) takes {_OUTPUTS[kind]}, here with [B, S] = "
                f"{list(shape)}: got {got!r}"
            )
        if kind is LossInputType.LOGIT:
            return {"logits": outputs.float()}
        if kind is LossInputType.VALUE:
            return {"values": outputs}
        # Losses expect 0.0 where no token is trained; a backend may return any number
        # there. `where` and not a product, because 0 times inf or nan is nan.
        is_trained = batch["token_mask"][:, 1:].to(outputs.device) != 0
        return {"next_token_logprobs": torch.where(is_trained, outputs[:, 1:], 0.0)}
