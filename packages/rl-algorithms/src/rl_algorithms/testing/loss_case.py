"""A loss under test: run it on a batch or on its parts, and compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.testing.batches import LossBatch
from rl_algorithms.testing.examples import ConformanceError
from rl_distributed.metrics.values import Sum, as_metric

__all__ = ["LossCase", "Reference", "check_close"]

Reference = Callable[
    [Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]], Tensor | float
]


class LossCase:
    """A loss under test."""

    def __init__(
        self,
        loss_fn: Any,
        make_batch: Callable[[int], LossBatch],
        reference: Reference,
        masks: Collection[str],
        optional: Collection[str],
        compare_metrics: bool,
    ) -> None:
        self.loss_fn, self.make_batch, self.reference = loss_fn, make_batch, reference
        self.masks, self.optional = masks, optional
        self.compare_metrics = compare_metrics

    def run(
        self,
        batch: LossBatch,
        cut: Callable[[LossBatch], Iterable[LossBatch]] = lambda batch: (batch,),
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        """Return loss, gradients and metrics summed over the parts made by `cut`."""
        leaves = {
            # Fresh leaves per run: gradients of two runs must not add up.
            name: value.detach().clone().requires_grad_()
            for name, value in batch.inputs.items()
        }
        num_seqs, num_toks = batch.counts()
        whole = LossBatch(batch.data, leaves, batch.rows_per_unit)
        total = torch.zeros((), dtype=torch.float64)
        metrics: dict[str, Any] = {}
        for part in cut(whole):
            loss, found = self.loss_fn(
                dict(part.data), num_seqs, num_toks, **dict(part.inputs)
            )
            total = total + loss.double()
            for name, value in found.items():
                metric = as_metric(value, name=name, plain=Sum)
                metrics[name] = (
                    metrics[name].merge(metric) if name in metrics else metric
                )
        # Unused inputs are allowed, as a loss may ignore one of its inputs.
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return (
            total.detach(),
            {
                name: torch.zeros_like(leaf) if grad is None else grad
                for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
            },
            metrics,
        )

    def same(
        self,
        check: str,
        what: str,
        batch: LossBatch,
        cut: Callable[[LossBatch], Iterable[LossBatch]],
    ) -> None:
        """Raise ConformanceError unless the parts of a batch add up to the batch."""
        want, want_grads, want_metrics = self.run(batch)
        got, grads, metrics = self.run(batch, cut)
        check_close(check, f"the loss depends on {what}", got, want)
        for name, grad in grads.items():
            check_close(
                check, f"the gradient depends on {what}", grad, want_grads[name]
            )
        if self.compare_metrics:
            _close_metrics(check, what, metrics, want_metrics)


def check_close(
    check: str,
    message: str,
    got: Tensor,
    want: Tensor,
    rtol: float = 1e-9,
    atol: float = 1e-11,
) -> None:
    """Raise ConformanceError unless two tensors agree.

    Args:
        check: Name of the check.
        message: Description of the violation.
        got: Value of the loss under test.
        want: Expected value.
        rtol: Relative tolerance.
        atol: Absolute tolerance.

    Raises:
        ConformanceError: The tensors differ.
    """
    if not torch.allclose(got.double(), want.double(), rtol=rtol, atol=atol):
        shown = [v.item() if v.dim() == 0 else v.tolist() for v in (got, want)]
        raise ConformanceError(check, f"{message}: got {shown[0]}, not {shown[1]}")


def _close_metrics(
    check: str, what: str, got: Mapping[str, Any], want: Mapping[str, Any]
) -> None:
    for name in sorted({*got, *want}):
        values = [
            float(metrics[name])
            if name in metrics and not metrics[name].is_empty
            else None
            for metrics in (got, want)
        ]
        # Also if both are None, and for equal infinities, which have no difference.
        if values[0] == values[1]:
            continue
        if None in values or not math.isclose(*values, rel_tol=1e-7, abs_tol=1e-9):  # type: ignore[arg-type]
            raise ConformanceError(
                check,
                f"metric {name!r} depends on {what}: got {values[0]}, not {values[1]}",
            )
