"""Rows for `PolicyInterface.train`, and the metrics that it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from rl_algorithms.trainers.settings.batch_plan import BatchPlan
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.metrics.values import MetricValue, Sum, as_metric

__all__ = ["count_tokens", "join_outputs", "pad_to_plan", "train_metrics"]

T = TypeVar("T")


def pad_to_plan(
    rows: BatchedDataDict[T], plan: BatchPlan, rows_per_sample: int = 1
) -> tuple[BatchedDataDict[T], int]:
    """Pad a batch so that optimizer steps and ranks divide it evenly.

    Args:
        rows: The rows of a step.
        plan: The batch sizes, in samples.
        rows_per_sample: Number of consecutive rows kept together; 2 if a sample is a
            pair.

    Returns:
        The rows, and the number of rows per optimizer step.
    """
    num_rows = rows.size
    num_samples = num_rows // rows_per_sample
    padded, per_step = plan.rows_for(num_samples)
    if padded == num_samples:
        return rows, per_step * rows_per_sample
    # Copies of real rows, masked: made-up rows could have lengths or values that a
    # model cannot process.
    extra = [*range(rows_per_sample)] * (padded - num_samples)
    rows = rows.select_indices([*range(num_rows), *extra])
    # A clone: the caller's rows may share this tensor.
    sample_mask = rows["sample_mask"].clone()
    sample_mask[num_rows:] = 0
    rows["sample_mask"] = sample_mask
    return rows, per_step * rows_per_sample


def count_tokens(rows: Mapping[str, Any]) -> dict[str, float]:
    """Return the counters of a step: rows, tokens, and trained tokens."""
    # The first token of a row is never predicted, so it is not trained on.
    mask = rows["token_mask"][:, 1:] * rows["sample_mask"].unsqueeze(1)
    return {
        "num_samples": float(rows["sample_mask"].sum()),
        "num_tokens": float(rows["input_lengths"].sum()),
        "num_valid_tokens": float(mask.sum()),
    }


def join_outputs(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the results of several calls of `train` as if it had been one.

    Values that some calls lack are omitted, except for the loss, which is required.
    """
    joined: dict[str, Any] = {
        name: torch.cat([torch.as_tensor(output[name]).flatten() for output in outputs])
        for name in ("loss", "grad_norm", "lr")
        if name == "loss" or all(name in output for output in outputs)
    }
    metrics: dict[str, list[Any]] = {}
    for output in outputs:
        for name, values in output.get("all_mb_metrics", {}).items():
            metrics.setdefault(name, []).extend(values)
    return {**joined, "all_mb_metrics": metrics}


def train_metrics(output: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the result of `train` to one number per name.

    Typed values are reduced by their type. Plain numbers are shares of a global batch:
    they are summed, and averaged over the optimizer steps of the call.
    """
    # float64, because sums over thousands of micro-batches lose digits in float32.
    losses = torch.as_tensor(output["loss"], dtype=torch.float64)
    num_steps = max(losses.numel(), 1)
    metrics: dict[str, Any] = {}
    for name, values in output["all_mb_metrics"].items():
        metrics[name] = _reduce(name, values, num_steps)
    metrics["loss"] = float(losses.mean()) if losses.numel() else 0.0
    for name in ("grad_norm", "lr"):
        if name in output:
            values = torch.as_tensor(output[name], dtype=torch.float64).flatten()
            if values.numel():
                metrics[name] = float(values.mean())
    return metrics


def _reduce(name: str, values: Sequence[Any], num_steps: int) -> MetricValue | float:
    typed = [as_metric(value, name=name, plain=Sum) for value in values]
    merged = typed[0]
    for value in typed[1:]:
        merged = merged.merge(value)
    return float(merged) / num_steps if isinstance(merged, Sum) else merged
