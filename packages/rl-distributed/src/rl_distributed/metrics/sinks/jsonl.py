"""A sink that appends JSON lines, and the reader of its file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["JsonlSink", "json_line", "read_metrics"]


def _plain(value: Any) -> Any:
    """Make a tree JSON: non-finite numbers become the text that `float` reads."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist())
    return str(value)


def json_line(record: Mapping[str, Any]) -> bytes:
    """Render a record as one strict JSON line.

    NaN and infinities, which JSON lacks, become `"nan"`, `"inf"` and `"-inf"`, so that
    `float(...)` reads every number back. Arrays become lists, other objects text.
    """
    text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def _open_for_append(path: Path) -> BinaryIO:
    """Open a file behind its last whole line: a killed writer may leave a torn one."""
    file = open(path, "a+b", buffering=0)  # noqa: SIM115 (the sink closes it)
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


class JsonlSink:
    """Appends to `metrics.jsonl`, one unbuffered write per line.

    Lines are `{"step": 3, "time": 1.7e9, "metrics": {"train/loss": 0.5}}`; text lines
    have `text` and hyper-parameter lines `hyperparams` in place of `metrics`. A resumed
    run appends; where it does a step again, the later line counts.

    Args:
        log_dir: The folder of the file; created if need be.
        filename: The name of the file.
    """

    def __init__(self, log_dir: Path, *, filename: str = "metrics.jsonl") -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.path = log_dir / filename
        self._file = _open_for_append(self.path)

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

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json_line(record))

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
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and "metrics" in record:
                metrics = {k: float(v) for k, v in record["metrics"].items()}
                yield int(record["step"]), metrics
