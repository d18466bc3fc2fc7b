"""`WeightLog`: which weights the generator had, in a file of the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_algorithms.trainers.run.step_records import (
    drop_later_steps,
    read_step_records,
)
from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics.sinks.jsonl import json_line
from rl_distributed.private_files import private_opener

if TYPE_CHECKING:
    from rl_models.weight_request import ConfirmedWeights

__all__ = ["WEIGHT_VERSIONS", "WeightLog"]

_logger = get_logger(__name__)

WEIGHT_VERSIONS = "weight_versions.jsonl"
"""Name of the file in the run folder."""


class WeightLog:
    """The file of confirmed weights, with one JSON line per transfer.

    Lines are `{"step": 20, "version": 80, "digest": "9f0c...", "processes": 4}`, where
    `step` is the number of completed steps when the generator had these weights. A
    write error ends the record with a warning, but not the run.

    Args:
        run_dir: The run folder; the file is created with the first transfer.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / WEIGHT_VERSIONS
        self._is_broken = False

    def add(self, step: int, confirmed: Sequence[ConfirmedWeights]) -> None:
        """Append versions that every process of the generator has confirmed."""
        if not confirmed or self._is_broken:
            return
        lines = b"".join(
            json_line(
                {
                    "step": step,
                    "version": one.version,
                    "digest": one.digest,
                    "processes": one.num_processes,
                }
            )
            for one in confirmed
        )
        try:
            with open(self.path, "ab", opener=private_opener) as file:
                file.write(lines)
        except OSError as error:
            self._is_broken = True
            _logger.warning(
                "versions of the weights are no longer recorded, because %s cannot be "
                "written: %s",
                self.path,
                error.strerror or error,
            )

    def resume_at(self, step: int) -> None:
        """Remove transfers of later steps, which will be repeated, and a torn line."""
        drop_later_steps(self.path, step)

    def read(self) -> Iterator[dict[str, Any]]:
        """Read the records, oldest first, skipping a torn line of a killed run."""
        return read_step_records(self.path)
