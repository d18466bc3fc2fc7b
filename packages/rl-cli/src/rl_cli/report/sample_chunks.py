"""Answers of a run in chunks that a page loads when somebody looks at them.

```
files of answers --> AnswerIndex --> chunks of about 256 KiB --+
                          |                                    |
                    index by step        inside the page, while all are small;
                                         else NAME_files/*.js
```
A page that is opened as a file may not read other files, but it may load scripts: a
chunk is one call of the function that the page has for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_cli.report.answer_index import KINDS, AnswerIndex
from rl_cli.report.run_reader import ReadStage
from rl_distributed.private_files import make_private_folder, private_opener

__all__ = ["ChunkStore", "script_json", "where_answers_are"]

_INLINE_BYTES = 1 << 20
# A search that finds little is far quicker than `str.translate` of every character.
_UNSAFE = re.compile("[<>&\u2028\u2029]")


def script_json(value: Any) -> str:
    """Return JSON that may stand inside of a script of an HTML page.

    Nothing in it can end the script, begin a comment of HTML, or break a line.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class ChunkStore:
    """Keeps chunks in memory while they are few, and else in a folder.

    Args:
        folder: Where the files go; it is made with the first one.
        inline_bytes: Size of all chunks from which on they are files.
    """

    def __init__(self, folder: Path, inline_bytes: int = _INLINE_BYTES) -> None:
        self.folder = folder
        self._inline_bytes = inline_bytes
        self._num_bytes = 0
        self._held: dict[str, str] = {}
        self.in_files = False
        """Whether the chunks are files."""
        for path in folder.glob("chunk-*.js"):
            path.unlink()  # of an earlier page of this name

    def add(self, name: str, records: list[str]) -> None:
        """Put a chunk away.

        Args:
            name: Unique; letters, digits and dashes.
            records: JSON texts, as `script_json` writes them.

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
        """Put the answers of a stage into chunks; return where those of a step lie.

        Args:
            stage: The stage.
            key: Begins the names of the chunks.

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

    @property
    def inline(self) -> Mapping[str, str]:
        """The chunks that stand inside the page, as JSON texts."""
        return self._held

    def _write(self, name: str, text: str) -> None:
        make_private_folder(self.folder)
        path = self.folder / f"chunk-{name}.js"
        with open(path, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(f"rlReport.chunk({json.dumps(name)},{text});\n")


def where_answers_are(index: AnswerIndex, stage: str, key: str) -> list[dict[str, Any]]:
    """Return what a page needs to find answers: one value, or none without answers.

    Args:
        index: The answers.
        stage: Name of the stage.
        key: Begins the names of the chunks.
    """
    rows = index.rows()
    where = {"kind": index.kind, "stage": stage, "key": key, "steps": rows}
    return [where] if rows else []
