"""Incremental reading of runs while they are being written.

```
files --stat--> unchanged? --> the same page
                   | no, and it is time
                   v
        new lines of metrics, new answers, small files --> next version of the page
```
Data stays in memory, so that an update only reads what is new. Updates are at least
`poll_s` seconds apart, and rare enough to take a quarter of one percent of a core in
all: watching a run must not slow it down.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_cli.report.actor_timeline import StageTimeline, read_stage_timeline
from rl_cli.report.answer_index import KINDS, AnswerIndex, answer_files
from rl_cli.report.metric_table import MetricTable
from rl_cli.report.page_data import page_data
from rl_cli.report.run_reader import (
    ReadRun,
    ReadStage,
    read_json,
    read_run,
    stage_folders,
)
from rl_cli.report.sample_chunks import (
    script_json,
    timeline_key,
    where_answers_are,
)
from rl_distributed.errors import ConfigError
from rl_distributed.runs.ending import ENDED, run_state
from rl_distributed.timing.timeline_file import TIMELINE

__all__ = ["LiveRuns"]

_REST = 400.0
"""Pause after an update, as a multiple of its own time; requests are extra."""
_LONGEST_REST_S = 60.0
_CHUNK_NAME = re.compile(r"([a-z0-9]{1,40})-([0-9]{1,15})")
_RUN_FILES = ("run.json", "result.json", "samples.json", ENDED)
_STAGE_FILES = (
    "metrics.jsonl",
    "updates.jsonl",
    TIMELINE,
    "result.json",
    "checkpoints",
)


class _GrowingTable:
    """The metrics in a file that is being appended to."""

    def __init__(self) -> None:
        self.table = MetricTable()
        self._inode = self._num_bytes = 0

    def update(self, path: Path) -> MetricTable:
        """Read new lines, or all lines if a resumed run has replaced the file."""
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._num_bytes:
                    self.table, self._num_bytes = MetricTable(), 0
                    self._inode = status.st_ino
                file.seek(self._num_bytes)
                for line in file:
                    # A line without its end is still being written.
                    if not line.endswith(b"\n"):
                        break
                    self._num_bytes += len(line)
                    self._add(line)
        except OSError:
            # Not there yet.
            pass
        return self.table

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(record, dict):
            self.table.add(record)


class LiveRuns:
    """The page of runs in progress, and the answers behind it.

    Its methods may be called from several threads.

    Args:
        folders: Folders of the runs.
        poll_s: Minimum number of seconds between updates.
        now_s: Clock for the updates.

    Raises:
        ConfigError: A folder is not that of a run.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        poll_s: float = 2.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.poll_s = poll_s
        self.runs: list[ReadRun] = []
        """State of the runs at the last update."""
        self.version = 0
        """Version of the page, increased with each change."""
        self._folders, self._now_s = list(folders), now_s
        self._lock = threading.Lock()
        self._tables: dict[Path, _GrowingTable] = {}
        self._indices: dict[tuple[Path, str], AnswerIndex] = {}
        self._by_key: dict[str, AnswerIndex] = {}
        self._timelines: dict[str, StageTimeline] = {}
        self._seen: list[Any] = []
        self._page: dict[str, Any] = {}
        self._text = ""
        self._next_s = float("-inf")
        self._look()

    def page(self) -> tuple[int, dict[str, Any]]:
        """Return the version of the page and its data, after an update if it is time.

        See `page_data`; `chunks` is empty, since the page requests them.
        """
        with self._lock:
            if self._now_s() >= self._next_s:
                self._look()
            return self.version, self._page

    def page_text(self) -> tuple[int, list[str], str]:
        """Return the version, the names of the runs, and the data as JSON."""
        with self._lock:
            if self._now_s() >= self._next_s:
                self._look()
            names = [str(run["name"]) for run in self._page["runs"]]
            return self.version, names, self._text

    def chunk(self, name: str) -> str | None:
        """Return a chunk of answers or a time line as JSON; None: there is none.

        Args:
            name: `KEY-NUMBER`, with a key from the page.
        """
        match = _CHUNK_NAME.fullmatch(name)
        # Checked before anything is looked up, since the name comes from a request.
        if match is None:
            return None
        with self._lock:
            number = int(match.group(2))
            timeline = self._timelines.get(match.group(1))
            if timeline is not None and number in timeline.records:
                return f"[{script_json(timeline.records[number])}]"
            index = self._by_key.get(match.group(1))
            if index is None or number >= index.num_chunks:
                return None
            return f"[{','.join(script_json(r) for r in index.chunk(number))}]"

    def newest_answers(self, most: int) -> list[dict[str, Any]]:
        """Return the latest answers of the latest stage, newest first.

        Args:
            most: Maximum number of answers.
        """
        with self._lock:
            for run in self.runs[-1:]:
                for stage in reversed(run.stages):
                    for kind in KINDS:
                        index = self._indices.get((stage.folder, kind))
                        if index is not None and index.num_chunks:
                            found = list(index.chunk(index.num_chunks - 1))
                            return found[: -most - 1 : -1]
        return []

    def _look(self) -> None:
        # CPU time of this thread: waiting for a disk does not load the machine.
        began_s = time.thread_time()
        seen = [mark for folder in self._folders for mark in _marks(folder)]
        if seen != self._seen:
            try:
                self.runs = [read_run(f, self._read_metrics) for f in self._folders]
            except ConfigError:
                if not self.version:
                    raise
                # The run is just being restarted: keep the old page until then.
            else:
                found = page_data(self.runs, self._answers, self._timeline)
                self._page = {**found, "files": None}
                self._page["chunks"] = {}
                # Serialized once per version, not for each viewer.
                self._text = script_json(self._page)
                self._seen = seen
                self.version += 1
        rest_s = min(_REST * (time.thread_time() - began_s), _LONGEST_REST_S)
        # The first update imports modules and reads everything, which is not repeated.
        if self._next_s == float("-inf"):
            rest_s = 0.0
        self._next_s = self._now_s() + max(self.poll_s, rest_s)

    def _read_metrics(self, path: Path) -> MetricTable:
        return self._tables.setdefault(path, _GrowingTable()).update(path)

    def _timeline(self, stage: ReadStage, key: str) -> dict[str, Any] | None:
        name, found = timeline_key(key), read_stage_timeline(stage.folder)
        self._timelines[name] = found
        return found.where(name)

    def _answers(self, stage: ReadStage, key: str) -> list[dict[str, Any]]:
        found = []
        for kind in KINDS:
            index = self._indices.setdefault(
                (stage.folder, kind), AnswerIndex(stage.folder, kind)
            )
            index.update()
            # After a restart of the index, the same number means another chunk.
            name = f"{key}{kind[0]}{index.generation}"
            # Pages that are open still ask under the old name; they get nothing rather
            # than other answers.
            for old in [k for k, held in self._by_key.items() if held is index]:
                del self._by_key[old]
            self._by_key[name] = index
            found += where_answers_are(index, stage.name, name)
        return found


def _marks(folder: Path) -> Iterator[Any]:
    """Yield values that change whenever a run writes to its files."""
    yield run_state(folder)
    record = read_json(folder / "run.json")
    paths = [folder / name for name in _RUN_FILES]
    paths += sorted((folder / "logs").glob("*.jsonl"))
    for stage in stage_folders(folder, record).values():
        paths += [stage / name for name in _STAGE_FILES]
        for kind in KINDS:
            paths += answer_files(stage, kind)
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            yield None
        else:
            yield path, status.st_ino, status.st_size, status.st_mtime_ns
