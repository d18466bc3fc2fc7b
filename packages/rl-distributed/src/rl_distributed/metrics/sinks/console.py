"""A sink that writes one log line per call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.logs.logging import get_logger

__all__ = ["ConsoleSink", "ConsoleSinkConfig"]

_logger = get_logger(__name__)


def _show(value: float) -> str:
    return (
        # Counts are shown in full, as `4e+06` would hide the last digits.
        str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    )


class ConsoleSinkConfig(Config):
    """What the console shows."""

    only: list[str] = Field(default_factory=list)
    """Name prefixes of the metrics to show; all if empty."""


class ConsoleSink:
    """Writes metrics through `logging`, so the program decides where they appear.

    Args:
        log_dir: Unused; every sink is given it.
        config: The options; None: the defaults.
    """

    config_class: ClassVar[type[Config]] = ConsoleSinkConfig

    def __init__(self, log_dir: Path, config: ConsoleSinkConfig | None = None) -> None:
        config = config or ConsoleSinkConfig()
        self._only = tuple(config.only)

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        """Write one line."""
        shown = {
            name: value
            for name, value in metrics.items()
            if not self._only or name.startswith(self._only)
        }
        if shown:
            fields = " ".join(f"{name}={_show(value)}" for name, value in shown.items())
            _logger.info("step %d: %s", step, fields)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write one line."""
        _logger.info("configuration: %s", dict(params))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write the text."""
        _logger.info("step %d: %s: %s", step, name, text)

    def flush(self) -> None:
        """Do nothing; log handlers flush every line."""

    def close(self) -> None:
        """Do nothing."""
