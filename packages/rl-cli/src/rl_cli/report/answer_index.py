"""Index of the answers in a run's files, by step and by chunk.

```
rollouts/part-*.jsonl      -- new lines --> step, reward --> rows of steps, places of
validation_samples.jsonl                                     chunks of about 256 KiB
                                                                      |
                      request for a chunk --> its lines --> checked records
```
The trainer keeps appending, and a resumed run truncates steps that it repeats: an
update reads new lines, and starts over if a file was removed or replaced.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.sampling.rollout_files import rollout_parts
from rl_cli.report.sample_records import checked_record

__all__ = ["KINDS", "AnswerIndex", "answer_files"]

KINDS = ("training", "held-out")
"""Kinds of answers, the most interesting first."""
_HELD_OUT = "validation_samples.jsonl"
# Large enough for few requests, small enough that a page shows a step at once.
_CHUNK_BYTES = 1 << 18
# The start of a line as written by a trainer, since parsing long lines is slow.
_BEGIN = re.compile(rb'\{"step":(\d{1,15}),"reward":(-?\d{1,15}(?:\.\d{1,17})?),')


def answer_files(folder: Path, kind: str) -> list[Path]:
    """Return the files with the answers of a stage, in order.

    Args:
        folder: Folder of the stage.
        kind: One of `KINDS`.
    """
    if kind == "training":
        return rollout_parts(folder)
    path = folder / _HELD_OUT
    return [path] if path.is_file() else []


@dataclass
class _Step:
    """Location of the answers of one step."""

    step: int
    first_chunk: int
    last_chunk: int
    count: int = 0
    num_rewards: int = 0
    total_reward: float = 0.0

    def row(self) -> list[float | int | None]:
        mean = self.total_reward / self.num_rewards if self.num_rewards else None
        return [
            self.step,
            self.count,
            None if mean is None else round(mean, 6),
            self.first_chunk,
            self.last_chunk,
        ]


@dataclass
class _File:
    """A file and the number of bytes read so far."""

    path: Path
    inode: int
    num_bytes: int = 0


@dataclass
class _Chunk:
    """Consecutive lines of a file that are loaded together."""

    path: Path
    start: int
    end: int

    @property
    def is_full(self) -> bool:
        return self.end - self.start >= _CHUNK_BYTES


@dataclass
class AnswerIndex:
    """Index of the answers of one kind in a stage."""

    folder: Path
    """Folder of the stage."""
    kind: str
    """One of `KINDS`."""
    generation: int = 0
    """Number of restarts, after each of which chunk numbers have a new meaning."""
    _files: list[_File] = field(default_factory=list)
    _chunks: list[_Chunk] = field(default_factory=list)
    _steps: list[_Step] = field(default_factory=list)

    @property
    def num_chunks(self) -> int:
        """Number of chunks so far; the last one may grow."""
        return len(self._chunks)

    def rows(self) -> list[list[float | int | None]]:
        """Return [step, count, mean reward, first chunk, last chunk] of each step."""
        return [step.row() for step in self._steps]

    def update(self) -> None:
        """Read lines written since the last update, except for an incomplete one."""
        paths = answer_files(self.folder, self.kind)
        if not self._goes_on(paths):
            self.generation += 1
            self._files, self._chunks, self._steps = [], [], []
        # From the last file read, which may have grown; those before it are complete.
        for path in paths[max(len(self._files) - 1, 0) :]:
            self._read(path)

    def _goes_on(self, paths: list[Path]) -> bool:
        """Return True if the files are those read before, possibly with more data."""
        if [file.path for file in self._files] != paths[: len(self._files)]:
            return False
        for file in self._files:
            try:
                status = file.path.stat()
            except OSError:
                return False
            # A resumed run rewrites the file, under a new inode or with fewer lines.
            if status.st_ino != file.inode or status.st_size < file.num_bytes:
                return False
        return True

    def _read(self, path: Path) -> None:
        try:
            with open(path, "rb") as lines:
                if not self._files or self._files[-1].path != path:
                    # Of the open file: the path may be replaced between two calls.
                    inode = os.fstat(lines.fileno()).st_ino
                    self._files.append(_File(path, inode))
                file = self._files[-1]
                lines.seek(file.num_bytes)
                for line in lines:
                    # Still being written; the next update reads it as a whole.
                    if not line.endswith(b"\n"):
                        return
                    self._add(line, file)
                    file.num_bytes += len(line)
        except OSError:
            # Deleted by the trainer's limit on files since it was listed.
            return

    def _add(self, line: bytes, file: _File) -> None:
        found = _step_and_reward(line)
        if found is None:
            return
        step, reward = found
        start, end = file.num_bytes, file.num_bytes + len(line)
        last = self._chunks[-1] if self._chunks else None
        if last is None or last.is_full or last.path != file.path:
            self._chunks.append(_Chunk(file.path, start, end))
        else:
            last.end = end
        place = len(self._chunks) - 1
        if not self._steps or self._steps[-1].step != step:
            self._steps.append(_Step(step, place, place))
        entry = self._steps[-1]
        entry.count += 1
        entry.last_chunk = place
        if reward is not None:
            entry.num_rewards += 1
            entry.total_reward += reward

    def chunk(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield the records of a chunk, with the fields shown on a page.

        Args:
            number: Index, less than `num_chunks`.
        """
        chunk = self._chunks[number]
        try:
            with open(chunk.path, "rb") as file:
                file.seek(chunk.start)
                data = file.read(chunk.end - chunk.start)
        except OSError:
            # Removed since the last update.
            return
        for line in data.splitlines():
            record = checked_record(_parsed(line))
            if record is not None:
                yield record


def _step_and_reward(line: bytes) -> tuple[int, float | None] | None:
    if (match := _BEGIN.match(line)) is not None:
        return int(match.group(1)), float(match.group(2))
    record = checked_record(_parsed(line))
    return None if record is None else (record["step"], record.get("reward"))


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
