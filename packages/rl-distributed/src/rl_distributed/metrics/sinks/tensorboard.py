"""A sink for TensorBoard, which is imported when the sink is made."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_distributed.errors import RegistryError

__all__ = ["TensorboardSink"]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat.update(_flatten(value, name))
        else:
            flat[name] = value
    return flat


def _summary_writer() -> Any:
    """Return torch's writer class; `torch` alone does not bring TensorBoard."""
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise RegistryError(
            "logger.sinks: 'tensorboard' needs the package tensorboard, which cannot "
            f"be imported ({error}); pip install 'rl-distributed[tensorboard]'"
        ) from error


class TensorboardSink:
    """Writes scalars and text as TensorBoard event files.

    Args:
        log_dir: The event files go to a folder below it.
        subfolder: The name of that folder.
    """

    def __init__(self, log_dir: Path, *, subfolder: str = "tensorboard") -> None:
        self._writer = _summary_writer()(log_dir=str(log_dir / subfolder))

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step, walltime=time_s)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write a table; TensorBoard's own plug-in wants a final metric with it."""
        rows = [f"| {key} | {value} |" for key, value in _flatten(params).items()]
        table = "\n".join(["| key | value |", "| --- | --- |", *rows])
        self._writer.add_text("hyperparams", table, global_step=0)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text summary."""
        self._writer.add_text(name, text, global_step=step)

    def flush(self) -> None:
        """Flush the event file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
