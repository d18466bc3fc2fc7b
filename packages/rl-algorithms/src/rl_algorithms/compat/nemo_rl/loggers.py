"""`Logger` with the configuration of NeMo RL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_algorithms.compat.nemo_rl.options import as_keys, refuse_keys, take_only
from rl_distributed import metrics

__all__ = ["Logger", "flatten_dict", "get_next_experiment_dir", "logger_settings"]

_SINKS: Mapping[str, tuple[str, ...]] = {
    "wandb": ("project", "name", "entity", "group", "tags", "notes"),
    "tensorboard": (),
    "mlflow": ("experiment_name", "run_name", "tracking_uri"),
}
"""Supported keys of each sink, by its name."""


def logger_settings(config: Any) -> dict[str, Any]:
    """Convert a logger configuration of NeMo RL to keys of `LoggerConfig`.

    Raises:
        ConfigError: SwanLab is enabled.
    """
    keys = as_keys(config)
    refuse_keys(
        keys,
        {"swanlab_enabled": (False, "write a MetricSink for it, or use wandb")},
        "logger",
    )
    sinks = [name for name in _SINKS if keys.get(f"{name}_enabled")]
    settings = {name: take_only(keys.get(name) or {}, _SINKS[name]) for name in sinks}
    found: dict[str, Any] = {
        "log_dir": keys.get("log_dir"),
        "sinks": ["jsonl", *sinks],
        "sink_settings": {name: given for name, given in settings.items() if given},
    }
    if keys.get("monitor_gpus"):
        every = (keys.get("gpu_monitoring") or {}).get("collection_interval", 10)
        found["sample_resources_every_s"] = every
    return found


class Logger(metrics.LoggerFacade):
    """See `rl_distributed.LoggerFacade`; metrics are also written to a JSON file.

    Args:
        cfg: Configuration of NeMo RL, a mapping or an object.
    """

    def __init__(self, cfg: Any) -> None:
        settings = logger_settings(cfg)
        super().__init__(metrics.LoggerConfig.from_dict(settings, source="logger"))

    def log_metrics(  # type: ignore[override]
        self,
        metrics: Mapping[str, Any],
        step: int,
        prefix: str = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """See `rl_distributed.LoggerFacade.log_metrics`.

        Args:
            metrics: Numbers by name.
            step: Step of the metrics.
            prefix: Prefix of each name, separated by a slash.
            step_metric: Not used: all sinks share one step.
            step_finished: Whether these are the step's last metrics.
        """
        super().log_metrics(metrics, step, prefix, step_finished)

    def finish(self) -> None:
        """Close all sinks."""
        self.close()


def get_next_experiment_dir(base_log_dir: str | os.PathLike[str]) -> str:
    """Create and return the folder `exp_NNN` with the next number.

    Args:
        base_log_dir: Folder of all experiments; created if it is missing.
    """
    base = Path(base_log_dir)
    names = (path.name.removeprefix("exp_") for path in base.glob("exp_*"))
    numbers = [int(name) for name in names if name.isascii() and name.isdigit()]
    number = max(numbers, default=0) + 1
    while True:
        folder = base / f"exp_{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            # Another run has just taken the number.
            number += 1
            continue
        return str(folder)


def flatten_dict(d: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """Flatten nested mappings and lists into one mapping of paths.

    Args:
        d: The mapping.
        sep: Separator of the parts of a path.
    """
    flat: dict[str, Any] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            items: Any = value.items()
        elif isinstance(value, list | tuple):
            items = enumerate(value)
        else:
            flat[path] = value
            return
        for key, item in items:
            add(f"{path}{sep}{key}" if path else str(key), item)

    add("", d)
    return flat
