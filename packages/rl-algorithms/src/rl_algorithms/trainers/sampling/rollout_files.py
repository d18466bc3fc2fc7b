"""Answers of training steps in files of the run folder, for people to read.

```
rollouts/part-00000.jsonl  part-00001.jsonl ... part-00041.jsonl   lines, by step
         kept              thinned out              is appended to
```
When the parts together exceed their limit, one between the first and the newest is
removed: the one with the nearest neighbors, so that the rest stays spread over the
whole run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_distributed.checkpoint.storage import write_bytes_durably
from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics.sinks.jsonl import json_line
from rl_distributed.private_files import create_private_folder, private_opener

__all__ = ["ROLLOUTS", "RolloutFiles", "rollout_parts"]

_logger = get_logger(__name__)

ROLLOUTS = "rollouts"
"""Name of the folder in the run folder."""
_PART_BYTES = 16 << 20
_LEAST_PARTS = 8
_PART = re.compile(r"part-(\d{5,})\.jsonl")


def rollout_parts(run_dir: Path) -> list[Path]:
    """Return the files of a run's answers in order, or [] without any."""
    folder = run_dir / ROLLOUTS
    if not folder.is_dir():
        return []
    found = {
        int(match.group(1)): path
        for path in folder.iterdir()
        if (match := _PART.fullmatch(path.name))
    }
    return [found[number] for number in sorted(found)]


class RolloutFiles:
    """Files of answers, with one JSON line per answer that begins with its step.

    `rl_algorithms.trainers.sampling.kept_answers` describes the other keys. A write
    error ends the keeping of answers with a warning, but not the run.

    Args:
        run_dir: The run folder; the subfolder is created with the first answer.
        max_bytes: Total size above which files are removed.
    """

    def __init__(self, run_dir: Path, max_bytes: int) -> None:
        self._run_dir = run_dir
        self._max_bytes = max_bytes
        self._part_bytes = max(min(_PART_BYTES, max_bytes // _LEAST_PARTS), 1)
        self._begun: Path | None = None
        self._is_broken = False

    def add(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Append the answers of a step, in one write.

        Args:
            step: Number of the step, from 1.
            answers: Records of the answers.
        """
        if not answers or self._is_broken:
            return
        lines = b"".join(json_line({"step": step, **answer}) for answer in answers)
        try:
            self._append(lines)
        except OSError as error:
            # Once is enough: a full disk would warn in each step.
            self._is_broken = True
            _logger.warning(
                "answers of training steps are no longer kept, because %s cannot be "
                "written: %s",
                self._run_dir / ROLLOUTS,
                error.strerror or error,
            )

    def _append(self, lines: bytes) -> None:
        path = self._part()
        with open(path, "ab", opener=private_opener) as file:
            # A killed process may have left a torn line. Start a new line after it, or
            # the first new record would be lost as well.
            is_torn = path != self._begun and not _ends_whole(path)
            file.write(b"\n" + lines if is_torn else lines)
        self._begun = path

    def _part(self) -> Path:
        """Return the file to append to, and start a new one if it is full."""
        parts = rollout_parts(self._run_dir)
        if parts and parts[-1].stat().st_size < self._part_bytes:
            return parts[-1]
        create_private_folder(self._run_dir / ROLLOUTS)
        self._free_space(parts)
        number = _number(parts[-1]) + 1 if parts else 0
        return self._run_dir / ROLLOUTS / f"part-{number:05d}.jsonl"

    def _free_space(self, parts: list[Path]) -> None:
        sizes = {path: path.stat().st_size for path in parts}
        while sum(sizes.values()) + self._part_bytes > self._max_bytes:
            # The first part shows how the run began, and the last one is appended to.
            inner = range(1, len(parts) - 1)
            if not inner:
                return
            place = min(
                inner, key=lambda i: _number(parts[i + 1]) - _number(parts[i - 1])
            )
            path = parts.pop(place)
            path.unlink()
            del sizes[path]

    def resume_at(self, step: int) -> None:
        """Remove answers of later steps, which will be repeated, and a torn line."""
        # From the newest: the first part that keeps all lines ends the search.
        for path in reversed(rollout_parts(self._run_dir)):
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _is_up_to(line, step)]
            if len(kept) == len(lines):
                return
            if kept:
                # Through a temporary file and a rename, so that a kill cannot lose the
                # lines to keep.
                write_bytes_durably(path, b"".join(kept))
                return
            path.unlink()

    def read(self) -> Iterator[dict[str, Any]]:
        """Read the records, oldest first, skipping a torn line of a killed run."""
        for path in rollout_parts(self._run_dir):
            for line in path.read_bytes().splitlines():
                record = _record(line)
                if record is not None:
                    yield record


def _number(path: Path) -> int:
    match = _PART.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def _ends_whole(path: Path) -> bool:
    if not path.stat().st_size:
        return True
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _is_up_to(line: bytes, step: int) -> bool:
    record = _record(line)
    return record is not None and line.endswith(b"\n") and record["step"] <= step


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole else None
