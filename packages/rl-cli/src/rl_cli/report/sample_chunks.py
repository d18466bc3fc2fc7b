"""Answers and time lines of a run in chunks that a page loads on demand.

```
files of answers --> AnswerIndex --> chunks of about 256 KiB --+
                          |                                    |
                    index by step        inside the page if small in total,
                                         else NAME_files/*.js; time lines likewise,
                                         a chunk for each step
```
A page opened as a local file may not read other files, but it may load scripts: each
chunk is a script with a single call of a function of the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_cli.report.actor_timeline import read_stage_timeline
from rl_cli.report.answer_index import KINDS, AnswerIndex
from rl_cli.report.run_reader import ReadStage
from rl_distributed.private_files import create_private_folder, private_opener

__all__ = ["ChunkStore", "script_json", "timeline_key", "where_answers_are"]

_INLINE_BYTES = 1 << 20
# Matches are rare, so a search is far faster than `str.translate`.
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element of an HTML page.

    It cannot end the script, start an HTML comment, or contain a line break or half of
    a character, which UTF-8 refuses.
    """
    # allow_nan=False: NaN is no JSON, and the page could not parse it.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class ChunkStore:
    """Keeps chunks in memory while they are small, and in a folder otherwise.

    Args:
        folder: Folder of the files, created with the first one.
        inline_bytes: Total size above which chunks become files.
    """

    def __init__(self, folder: Path, inline_bytes: int = _INLINE_BYTES) -> None:
        self.folder = folder
        self._inline_bytes = inline_bytes
        self._num_bytes = 0
        self._held: dict[str, str] = {}
        self.in_files = False
        """True if the chunks are files."""
        # Left by an earlier page of the same name.
        for path in folder.glob("chunk-*.js"):
            path.unlink()

    def add(self, name: str, records: list[str]) -> None:
        """Add a chunk.

        Args:
            name: Unique name of letters, digits and dashes.
            records: JSON texts from `script_json`.

        Raises:
            OSError: The folder cannot be written.
        """
        text = f"[{','.join(records)}]"
        self._num_bytes += len(text)
        self._held[name] = text
        if self.in_files or self._num_bytes > self._inline_bytes:
            self.in_files = True
            for held, content in self._held.items():
                self._write(held, content)
            self._held.clear()

    def put(self, stage: ReadStage, key: str) -> list[dict[str, Any]]:
        """Add the answers of a stage as chunks, and return their locations by step.

        Args:
            stage: The stage.
            key: Prefix of the names of the chunks.

        Raises:
            OSError: The folder cannot be written.
        """
        found = []
        for kind in KINDS:
            index, name = AnswerIndex(stage.folder, kind), f"{key}{kind[0]}"
            index.update()
            for number in range(index.num_chunks):
                records = [script_json(record) for record in index.chunk(number)]
                self.add(f"{name}-{number}", records)
            found += where_answers_are(index, stage.name, name)
        return found

    def put_timeline(self, stage: ReadStage, key: str) -> dict[str, Any] | None:
        """Add the time line of a stage as chunks, and return their names by step.

        Args:
            stage: The stage.
            key: Prefix of the names of the chunks.

        Raises:
            OSError: The folder cannot be written.
        """
        timeline, name = read_stage_timeline(stage.folder), timeline_key(key)
        for number, record in timeline.records.items():
            self.add(f"{name}-{number}", [script_json(record)])
        return timeline.where(name)

    @property
    def inline(self) -> Mapping[str, str]:
        """Chunks to embed in the page, as JSON texts."""
        return self._held

    def _write(self, name: str, text: str) -> None:
        create_private_folder(self.folder)
        path = self.folder / f"chunk-{name}.js"
        with open(path, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(f"rlReport.chunk({json.dumps(name)},{text});\n")


def timeline_key(key: str) -> str:
    """Return the prefix of the names of a stage's time line."""
    return f"{key}l"


def where_answers_are(index: AnswerIndex, stage: str, key: str) -> list[dict[str, Any]]:
    """Return the locations of answers for a page; [] if there are none.

    Args:
        index: Index of the answers.
        stage: Name of the stage.
        key: Prefix of the names of the chunks.
    """
    rows = index.rows()
    where = {"kind": index.kind, "stage": stage, "key": key, "steps": rows}
    return [where] if rows else []
