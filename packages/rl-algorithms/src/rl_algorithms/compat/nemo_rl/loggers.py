"""`Logger` with the configuration of NeMo RL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_algorithms.compat.nemo_rl.options import as_keys, refuse_keys, take_only
from rl_distributed import metrics

__all__ = ["Logger", "flatten_dict", "logger_settings"]

_SINKS: Mapping[str, tuple[str, ...]] = {
    "wandb": ("project", "name", "entity", "group", "tags", "notes"),
    "tensorboard": (),
    "mlflow": ("experiment_name", "run_name", "tracking_uri"),
}
"""By name, the keys that a sink has here too."""


def logger_settings(config: Any) -> dict[str, Any]:
    """Return the keys of `LoggerConfig` that a configuration of theirs stands for.

    Raises:
        ConfigError: SwanLab is asked for.
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
    """See `rl_distributed.LoggerFacade`; metrics are written to a JSON file too.

    Args:
        cfg: Their configuration, a mapping or an object.
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
            step: The step they belong to.
            prefix: Put before each name with a slash.
            step_metric: Not used: the step is that of all sinks.
            step_finished: Whether these are the step's last metrics.
        """
        super().log_metrics(metrics, step, prefix, step_finished)

    def finish(self) -> None:
        """Close all sinks."""
        self.close()


def flatten_dict(d: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """Return nested mappings and lists as one mapping of paths.

    Args:
        d: The mapping.
        sep: Between the parts of a path.
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
