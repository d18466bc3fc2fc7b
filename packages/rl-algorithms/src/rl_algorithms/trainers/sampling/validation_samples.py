"""Sample answers of every validation in a file of the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.step_records import (
    drop_later_steps,
    read_step_records,
)
from rl_distributed.metrics.sinks.jsonl import json_line
from rl_distributed.private_files import private_opener

__all__ = ["VALIDATION_SAMPLES", "ValidationSamples"]

VALIDATION_SAMPLES = "validation_samples.jsonl"


class ValidationSamples:
    """The file of answers, with one JSON line per answer.

    Lines are `{"step": 20, "prompt": ..., "response": ..., "reward": 1.0}`, with
    `expected` if the right answer is known, and `dataset` if there are several.

    Args:
        run_dir: The run folder; the file is created with the first answer.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / VALIDATION_SAMPLES

    def add(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the answers of a validation."""
        if not samples:
            return
        lines = b"".join(json_line({"step": step, **sample}) for sample in samples)
        with open(self.path, "ab", opener=private_opener) as file:
            file.write(lines)

    def resume_at(self, step: int) -> None:
        """Remove answers of later steps, which will be repeated, and a torn line."""
        drop_later_steps(self.path, step)

    def read(self) -> Iterator[dict[str, Any]]:
        """Read the records, oldest first, skipping a torn line of a killed run."""
        return read_step_records(self.path)
