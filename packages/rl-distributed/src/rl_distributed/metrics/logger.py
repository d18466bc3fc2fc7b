"""`LoggerFacade`: one call, all sinks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import Field, field_validator

from rl_distributed.config import Config, changeable
from rl_distributed.errors import ConfigError, UserError
from rl_distributed.logs.logging import check_log_level, get_logger
from rl_distributed.metrics.distribution import Distribution, Histogram
from rl_distributed.metrics.guard import FailurePolicy, GuardedSink
from rl_distributed.metrics.sampler import ResourceSampler
from rl_distributed.metrics.sink import MetricSink, TableSink, sink_registry
from rl_distributed.metrics.sinks.jsonl import json_line
from rl_distributed.metrics.table import table_rows
from rl_distributed.metrics.values import MetricError, to_floats
from rl_distributed.private_files import create_private_folder, private_opener
from rl_distributed.process.closing import close_after
from rl_distributed.redaction import redacted

__all__ = ["LoggerConfig", "LoggerFacade"]

_logger = get_logger(__name__)


class LoggerConfig(Config):
    """Sinks of the metrics, and their settings."""

    log_dir: str | None = None
    """Folder of everything the sinks write; None: the program's own choice, which is
    the run folder in training."""
    sinks: list[str] = Field(default_factory=lambda: ["jsonl"])
    """Names of the sinks: console, jsonl, tensorboard, wandb, mlflow, trackio,
    prometheus, or one of another package."""
    sink_settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of single sinks, by name: `{"console": {"only": ["train/"]}}`."""
    on_sink_failure: FailurePolicy = "retry"
    """What to do when a sink fails: `retry` warns once, counts, and tries again with
    the next metrics; `drop` leaves it out from then on; `raise` ends the run."""
    level: str | None = Field(default=None, json_schema_extra=changeable())
    """Least level of the program's log lines, DEBUG, INFO, WARNING, ERROR or CRITICAL,
    with those of single loggers: `INFO,ray=WARNING`; None: as the program set it."""
    sample_resources_every_s: float | None = Field(
        default=None, gt=0, json_schema_extra=changeable()
    )
    """Seconds between two samples of CPU, memory, GPUs and Ray's object store of the
    program's node, logged as `system/...`; None: no sampling."""
    timeline: bool = True
    """Whether to record when the program and its workers executed what, in
    `timeline.jsonl`, which stays below 4 MiB."""

    @field_validator("level")
    @classmethod
    def _check_level(cls, value: str | None) -> str | None:
        if value is not None:
            check_log_level(value)
        return value


def _build_sink(name: str, settings: Mapping[str, Any], log_dir: Path) -> MetricSink:
    factory = sink_registry.get(name)
    config_class: type[Config] | None = getattr(factory, "config_class", None)
    try:
        if config_class is None:
            return factory(log_dir, **settings)
        source = f"logger.sink_settings.{name}"
        return factory(log_dir, config_class.from_dict(settings, source=source))
    except TypeError as error:
        raise ConfigError(
            f"logger.sink_settings.{name}: the sink cannot be made with "
            f"{sorted(settings)}: {error}"
        ) from error
    except OSError as error:
        if error.filename is None:  # not of a file, but of a connection
            raise
        raise ConfigError(
            f"logger.log_dir: the sink {name!r} cannot write to {log_dir}: "
            f"{error}; name a folder that you may write to"
        ) from error


def _build_sinks(config: LoggerConfig, log_dir: Path) -> dict[str, GuardedSink]:
    if repeated := {name for name in config.sinks if config.sinks.count(name) > 1}:
        raise ConfigError(f"logger.sinks: {sorted(repeated)} named more than once")
    if unused := sorted(set(config.sink_settings) - set(config.sinks)):
        raise ConfigError(
            f"logger.sink_settings: {unused} not in logger.sinks {config.sinks}; "
            "add the sink or drop its settings"
        )
    sinks: dict[str, GuardedSink] = {}
    try:
        for name in config.sinks:
            settings = config.sink_settings.get(name, {})
            try:
                sink = _build_sink(name, settings, log_dir)
            # Wrong settings are for the user to fix, whatever the failure policy.
            except UserError:
                raise
            except Exception as error:
                # A service that does not answer is no mistake of the user's.
                if config.on_sink_failure == "raise":
                    raise
                _logger.warning(
                    "metrics sink %r cannot be made and is left out: %r", name, error
                )
                continue
            sinks[name] = GuardedSink(name, sink, config.on_sink_failure)
    except BaseException:
        # The sinks made so far hold files and ports.
        for made in sinks.values():
            made.close()
        raise
    return sinks


class LoggerFacade:
    """Sends metrics to all sinks of a run.

    A sink that fails (a full disk, a server that is gone) is reported once;
    `LoggerConfig.on_sink_failure` says what becomes of it. One that cannot be made
    because its service does not answer is left out, except under the policy `raise`.
    Methods may be called from any thread.

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
        # Sinks handle one call at a time. Reentrant, because
        # `log_metrics` flushes under it.
        self._lock = threading.RLock()
        self._step = 0
        self._sinks = _build_sinks(config, self.log_dir)
        self._sampler: ResourceSampler | None = None
        self.sample_resources_every(config.sample_resources_every_s)

    def sample_resources_every(self, interval_s: float | None) -> None:
        """Sample the node's resources from now on; None: no longer."""
        # Stopped without holding the lock, which its thread may be waiting for.
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()
        if interval_s is not None:
            self._sampler = ResourceSampler(self, interval_s)
            self._sampler.start()

    @property
    def sinks(self) -> Mapping[str, MetricSink]:
        """The sinks that still work, by name."""
        return {name: guard.sink for name, guard in self._sinks.items() if guard.works}

    @property
    def num_failures(self) -> Mapping[str, int]:
        """Number of failures of each sink."""
        return {name: guard.num_failures for name, guard in self._sinks.items()}

    @property
    def shows_tables(self) -> bool:
        """Whether a sink shows tables, so that making one is worth the while."""
        return any(isinstance(sink, TableSink) for sink in self.sinks.values())

    @property
    def step(self) -> int:
        """The newest step that something was logged for."""
        return self._step

    def resume_at(self, step: int) -> None:
        """Go on with a run that has a checkpoint of this step.

        Sinks drop the values of later steps, which come again, or keep them instead of
        the new ones, so that no step is recorded twice. Call it before anything is
        logged.

        Raises:
            MetricError: The step is negative, or behind what was logged.
        """
        with self._lock:
            self._advance(step)
            self._each("resume_at", step)

    def go_back_to(self, step: int) -> None:
        """Go on behind an earlier step, after some that do not count any more.

        As after `resume_at`, no step is recorded twice.

        Raises:
            MetricError: The step is negative, or has not come yet.
        """
        with self._lock:
            if not 0 <= step <= self._step:
                raise MetricError(
                    f"go_back_to needs a step from 0 to {self._step}, the newest: got "
                    f"{step}"
                )
            self._step = step
            self._each("resume_at", step)

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
            step: The step they belong to, not negative, and not before the last one.
            prefix: Put before each name with a slash.
            step_finished: Whether these are the step's last metrics; sinks flush then.

        Raises:
            MetricError: A value is no number, or the step is negative or goes back.
        """
        numbers = _prefixed(to_floats(metrics), prefix)
        with self._lock:
            self._advance(step)
            if numbers:
                self._each("log_metrics", numbers, step, time.time())
            if step_finished:
                self.flush()

    def log_between_steps(self, metrics: Mapping[str, Any], prefix: str = "") -> None:
        """Write metrics that belong to no step, such as a temperature.

        They are given the newest step that is known when they are written.

        Raises:
            MetricError: A value is no number.
        """
        numbers = _prefixed(to_floats(metrics), prefix)
        with self._lock:
            if numbers:
                self._each("log_metrics", numbers, self._step, time.time())

    def log_histogram(self, histogram: Any, step: int, name: str) -> None:
        """Write how values are spread.

        Args:
            histogram: A `Histogram`, a `Distribution`, or numbers to count: an
                iterable, an array or a tensor of any shape.
            step: The step that it belongs to.
            name: Its complete name.

        Raises:
            MetricError: Nothing in it is a finite number, or the step goes back.
        """
        if isinstance(histogram, Distribution):
            histogram = histogram.histogram()
        elif not isinstance(histogram, Histogram):
            histogram = Histogram.of(histogram)
        with self._lock:
            self._advance(step)
            self._each("log_histogram", name, histogram, step, time.time())

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Write a matplotlib figure; it stays the caller's to close.

        Raises:
            MetricError: It is no figure, or the step goes back.
        """
        if not callable(getattr(figure, "savefig", None)):
            raise MetricError(
                f"plot {name!r} must be a matplotlib figure: got "
                f"{type(figure).__name__}; of axes, pass axes.figure"
            )
        with self._lock:
            self._advance(step)
            self._each("log_plot", name, figure, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved configuration; secrets in it are replaced by `***`."""
        with self._lock:
            self._each("log_hyperparams", redacted(params))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a piece of text that belongs to a step.

        Raises:
            MetricError: The step is negative or goes back.
        """
        with self._lock:
            self._advance(step)
            self._each("log_text", name, text, step)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        step: int,
    ) -> None:
        """Write a table that belongs to a step, where a sink shows tables.

        Args:
            name: Its complete name; the tables of further steps have the same.
            columns: Names of the columns.
            rows: One value per column each. At most 1,000 rows and 10,000 characters
                of a cell are written; lists and mappings become JSON texts.
            step: The step that it belongs to.

        Raises:
            MetricError: The columns have no different names, a row does not fit them,
                or the step goes back.
        """
        cells = table_rows(name, columns, rows)
        with self._lock:
            self._advance(step)
            self._each("log_table", name, list(columns), cells, step)

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
        create_private_folder(path.parent)
        with open(path, "wb", opener=private_opener) as file:
            file.writelines(json_line(record) for record in records)
        return path

    def flush(self) -> None:
        """Flush all sinks."""
        with self._lock:
            self._each("flush")

    def close(self) -> None:
        """End the sampling, then close all sinks; a second call does nothing.

        Raises:
            Exception: What a sink raised, under the policy `raise`; all are closed.
        """
        self.sample_resources_every(None)
        failed: list[Exception] = []
        with self._lock:
            for guard in self._sinks.values():
                try:
                    guard.close()
                except Exception as error:
                    # The remaining sinks must still release their files and ports.
                    failed.append(error)
        if failed:
            raise failed[0]

    def __enter__(self) -> LoggerFacade:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_after(error, self.close, "the metrics")

    def _advance(self, step: int) -> None:
        if step < 0:
            raise MetricError(f"step must not be negative: got {step}")
        if step < self._step:
            raise MetricError(
                f"step must not go back: got {step} after {self._step}; log the "
                "metrics of a step before those of the next"
            )
        self._step = step

    def _each(self, method: str, *arguments: Any) -> None:
        for guard in self._sinks.values():
            guard.call(method, *arguments)


def _prefixed(numbers: dict[str, float], prefix: str) -> dict[str, float]:
    if not prefix:
        return numbers
    return {f"{prefix}/{name}": value for name, value in numbers.items()}
