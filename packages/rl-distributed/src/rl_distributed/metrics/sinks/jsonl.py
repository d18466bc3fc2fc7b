"""A sink that appends JSON lines, and the reader of its file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from rl_distributed.checkpoint.storage import write_bytes_durably
from rl_distributed.config import Config
from rl_distributed.json_lines import read_records, step_of
from rl_distributed.metrics.distribution import Histogram
from rl_distributed.metrics.sinks.plain import plain_tree
from rl_distributed.private_files import create_private_folder, private_opener

__all__ = ["JsonlSink", "JsonlSinkConfig", "json_line", "read_metrics", "read_records"]


def json_line(record: Mapping[str, Any]) -> bytes:
    """Render a record as one JSON line with its end."""
    text = json.dumps(plain_tree(record), ensure_ascii=False, separators=(",", ":"))
    return text.encode() + b"\n"


def _open_for_append(path: Path) -> BinaryIO:
    """Open a file behind its last whole line: a killed writer may leave a torn one."""
    # The sink closes it.
    file = open(path, "a+b", buffering=0, opener=private_opener)  # noqa: SIM115
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(-1, os.SEEK_END)
        # Terminate the torn line, so that the next one is not lost with it.
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


class JsonlSinkConfig(Config):
    """Names of what the sink writes."""

    filename: str = "metrics.jsonl"
    """Name of the file below the run's folder."""
    plots: str = "plots"
    """Folder of plots below the run's folder."""


class JsonlSink:
    """Appends to `metrics.jsonl`, one unbuffered write per line.

    Lines are `{"step": 3, "time": 1.7e9, "metrics": {"train/loss": 0.5}}`; others have
    `text`, `histograms`, `plots` (names of PNG files) or `hyperparams` in place of
    `metrics`. A resumed run appends, behind the step that it resumes from.

    Args:
        log_dir: The folder of the file; created if need be.
        config: The options; None: the defaults.
    """

    config_class: ClassVar[type[Config]] = JsonlSinkConfig

    def __init__(self, log_dir: Path, config: JsonlSinkConfig | None = None) -> None:
        config = config or JsonlSinkConfig()
        create_private_folder(log_dir)
        self.path = log_dir / config.filename
        self._plots = log_dir / config.plots
        self._file = _open_for_append(self.path)
        self._torn = False

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        """Append one line."""
        self._write({"step": step, "time": time_s, "metrics": metrics})

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Append one line."""
        self._write({"hyperparams": params})

    def log_text(self, name: str, text: str, step: int) -> None:
        """Append one line."""
        self._write({"step": step, "text": {name: text}})

    def log_histogram(
        self, name: str, histogram: Histogram, step: int, time_s: float
    ) -> None:
        """Append one line with edges and counts."""
        shown = {"edges": histogram.edges, "counts": histogram.counts}
        self._write({"step": step, "time": time_s, "histograms": {name: shown}})

    def log_plot(self, name: str, figure: Any, step: int) -> None:
        """Save a PNG file and append one line with its path."""
        # Slashes would create folders, and `..` could lead out of this one.
        plain = re.sub(r"[^\w.-]+", "-", name)
        path = self._plots / f"{plain}-{step}.png"
        create_private_folder(path.parent)
        figure.savefig(path, format="png")
        shown = path.relative_to(self.path.parent).as_posix()
        self._write({"step": step, "plots": {name: shown}})

    def resume_at(self, step: int) -> None:
        """Drop the lines of later steps, which will be repeated."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if step_of(line) <= step]
        if len(kept) == len(lines):
            return
        self._file.close()
        try:
            # Through another file and a rename: a kill here must not cost the history.
            write_bytes_durably(self.path, b"".join(kept))
        finally:
            self._file = _open_for_append(self.path)

    def _write(self, record: Mapping[str, Any]) -> None:
        line = json_line(record)
        data = memoryview(b"\n" + line if self._torn else line)
        # Until the whole line is written: after a failure, the next one
        # starts on a new line.
        self._torn = True
        while data:
            # A disk that fills up takes a part of the line before it refuses.
            data = data[self._file.write(data) :]
        self._torn = False

    def flush(self) -> None:
        """Do nothing; writes are unbuffered."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(
    path: str | os.PathLike[str],
) -> Iterator[tuple[int, dict[str, float]]]:
    """Read the metric lines of a file, oldest first, as (step, metrics).

    A torn line, left by a writer that was killed, is skipped.
    """
    for record in read_records(path):
        if "metrics" in record:
            metrics = {k: float(v) for k, v in record["metrics"].items()}
            yield int(record["step"]), metrics
