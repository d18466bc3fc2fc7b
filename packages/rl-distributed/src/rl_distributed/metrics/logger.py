"""`LoggerFacade`: one call, all sinks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_distributed.logging import get_logger
from rl_distributed.metrics.sink import MetricSink, sink_registry
from rl_distributed.metrics.sinks.jsonl import json_line
from rl_distributed.metrics.values import MetricError, to_floats

__all__ = ["LoggerConfig", "LoggerFacade"]

_logger = get_logger(__name__)


class LoggerConfig(Config):
    """Where metrics go."""

    log_dir: str | None = None
    """Folder of everything the sinks write; None: the program's own choice, which is
    the run folder in training."""
    sinks: list[str] = Field(default_factory=lambda: ["jsonl"])
    """Names of the sinks: console, jsonl, tensorboard, or one of another package."""
    sink_settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments of single sinks, by name: `{"console": {"only": ["train/"]}}`."""


def _make_sinks(config: LoggerConfig, log_dir: Path) -> dict[str, MetricSink]:
    if repeated := {name for name in config.sinks if config.sinks.count(name) > 1}:
        raise ConfigError(f"logger.sinks: {sorted(repeated)} named more than once")
    if unused := sorted(set(config.sink_settings) - set(config.sinks)):
        raise ConfigError(
            f"logger.sink_settings: {unused} not in logger.sinks {config.sinks}; "
            "add the sink or drop its settings"
        )
    sinks: dict[str, MetricSink] = {}
    for name in config.sinks:
        settings = config.sink_settings.get(name, {})
        factory = sink_registry.get(name)
        try:
            sinks[name] = factory(log_dir, **settings)
        except TypeError as error:
            raise ConfigError(
                f"logger.sink_settings.{name}: the sink cannot be made with "
                f"{sorted(settings)}: {error}"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"logger.log_dir: the sink {name!r} cannot write to {log_dir}: "
                f"{error}; name a folder that you may write to"
            ) from error
    return sinks


class LoggerFacade:
    """Sends metrics to all sinks of a run.

    A sink that fails later (a full disk, a server that is gone) is reported once and
    left out from then on: losing a curve must not end a run.

    Args:
        config: Which sinks, and where.
        log_dir: The folder to use where the configuration names none.

    Raises:
        ConfigError: No folder is known, or a sink cannot be made.
        RegistryError: A sink's name is unknown, or its package is missing.
    """

    def __init__(
        self, config: LoggerConfig, log_dir: str | os.PathLike[str] | None = None
    ) -> None:
        folder = config.log_dir if config.log_dir is not None else log_dir
        if folder is None:
            raise ConfigError(
                "logger.log_dir must name a folder: got None, and the program gave none"
            )
        self.log_dir = Path(folder)
        self._sinks = _make_sinks(config, self.log_dir)

    @property
    def sinks(self) -> Mapping[str, MetricSink]:
        """The sinks that still work, by name."""
        return dict(self._sinks)

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int,
        prefix: str = "",
        step_finished: bool = False,
    ) -> None:
        """Write metrics of a step.

        Args:
            metrics: Numbers or typed values by name; a typed value without an
                observation is left out.
            step: The step they belong to, not negative.
            prefix: Put before each name with a slash.
            step_finished: Whether these are the step's last metrics; sinks flush then.

        Raises:
            MetricError: A value is no number, or the step is negative.
        """
        if step < 0:
            raise MetricError(f"step must not be negative: got {step}")
        numbers = to_floats(metrics)
        if prefix:
            numbers = {f"{prefix}/{name}": value for name, value in numbers.items()}
        now = time.time()
        if numbers:
            self._each(lambda sink: sink.log_metrics(numbers, step, now))
        if step_finished:
            self.flush()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved configuration."""
        self._each(lambda sink: sink.log_hyperparams(params))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a piece of text that belongs to a step."""
        self._each(lambda sink: sink.log_text(name, text, step))

    def log_batched_dict_as_jsonl(
        self, batch: Mapping[str, Sequence[Any]], filename: str
    ) -> Path:
        """Write columns of equal length as one JSON line per row below `log_dir`.

        Raises:
            MetricError: The columns differ in length.
        """
        lengths = {name: len(column) for name, column in batch.items()}
        if len(set(lengths.values())) > 1:
            raise MetricError(f"columns must have one length: got {lengths}")
        names = list(batch)
        rows = zip(*batch.values(), strict=True)
        return self._write_lines(
            (dict(zip(names, row, strict=True)) for row in rows), filename
        )

    def log_string_list_as_jsonl(self, texts: Iterable[str], filename: str) -> Path:
        """Write one JSON line `{"content": text}` per text below `log_dir`."""
        return self._write_lines(({"content": text} for text in texts), filename)

    def _write_lines(self, records: Iterable[Mapping[str, Any]], filename: str) -> Path:
        path = self.log_dir / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.writelines(json_line(record) for record in records)
        return path

    def flush(self) -> None:
        """Flush all sinks."""
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Close all sinks; calling it again does nothing."""
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def __enter__(self) -> LoggerFacade:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _each(self, call: Callable[[MetricSink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception:
                # Any failure of a sink is its own, whatever a third-party one raises.
                del self._sinks[name]
                _logger.exception(
                    "metrics sink %r failed and is left out from now on", name
                )
