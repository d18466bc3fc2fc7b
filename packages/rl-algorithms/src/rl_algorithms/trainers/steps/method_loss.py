"""`MethodLoss`: a loss from a trainer's method, run in the training workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.errors import AlgorithmError
from rl_models.types import (
    LossInputType,
    LossType,
    TrainingRows,
)

__all__ = ["MethodLoss"]


class MethodLoss:
    """The mean over rows returned by `trainer._compute_loss(batch, outputs)`.

    The workers receive the class and the attributes that the subclass's own code has
    set, with their current values, but not workers, data or callbacks. A micro-batch is
    weighted by its share of the valid rows.

    Args:
        trainer: Trainer with the method.
        names: Attributes set by the subclass's own code.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGPROB

    def __init__(self, trainer: Any, names: Iterable[str]) -> None:
        self._trainer, self._names = trainer, names
        self._missing: Mapping[str, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the attributes that can be pickled, and reasons for the others."""
        # Imported late: only a process that sends the loss has Ray, and it loads
        # slowly.
        from ray import cloudpickle  # noqa: PLC0415

        values: dict[str, Any] = {"config": self._trainer.config}
        missing = {}
        for name in self._names:
            value = getattr(self._trainer, name, None)
            try:
                cloudpickle.dumps(value)
            except Exception as error:
                missing[name] = f"{type(error).__name__}: {error}"
            else:
                values[name] = value
        return _rebuild, (type(self._trainer), values, missing)

    def __call__(
        self,
        data: TrainingRows,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the share of this micro-batch."""
        logprobs = inputs["next_token_logprobs"]
        rows = (data["sample_mask"] != 0).nonzero().flatten()
        if not len(rows):  # padding rows only; the graph must still reach all weights
            return logprobs.sum() * 0.0, {}
        if len(rows) < len(logprobs):
            data, logprobs = data.select_indices(rows.tolist()), logprobs[rows]
        # Aligned with the tokens, of which the first has no log-prob.
        outputs = {"logprobs": torch.nn.functional.pad(logprobs, (1, 0))}
        loss = self._call(data, outputs)
        # The method returns a mean over this micro-batch; the sum of these shares over
        # all micro-batches and ranks is the mean over the whole batch.
        return loss * (len(rows) / global_valid_seqs), {}

    def _call(self, data: TrainingRows, outputs: Mapping[str, Tensor]) -> Tensor:
        name = f"{type(self._trainer).__name__}._compute_loss"
        try:
            loss = self._trainer._compute_loss(data, outputs)
        except AttributeError as error:
            reason = self._missing.get(error.name or "")
            if reason is None:
                raise
            raise AlgorithmError(
                f"{name} runs in the training workers, where self.{error.name} cannot "
                f"be sent ({reason}): keep plain values in the attributes it uses"
            ) from error
        if isinstance(loss, torch.Tensor) and loss.ndim == 0:
            return loss
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else None
        got = type(loss).__name__ if shape is None else f"a tensor of shape {shape}"
        raise AlgorithmError(
            f"{name} must return the loss as one number, a tensor of shape []: got "
            f"{got}; take the mean over the rows"
        )


def _rebuild(
    cls: type[Any], values: Mapping[str, Any], missing: Mapping[str, str]
) -> MethodLoss:
    # Not `__init__`, which would set up a run.
    trainer = object.__new__(cls)
    vars(trainer).update(values)
    loss = MethodLoss(trainer, ())
    loss._missing = missing
    return loss
