"""Answers of a run in chunks that a page loads when somebody looks at them.

```
validation_samples.jsonl --> records, checked --> chunks of about 256 KiB --+
                                   |                                        |
                             index by step             inside the page, while all are
                                                       small; else NAME_files/*.js
```
A page that is opened as a file may not read other files, but it may load scripts: a
chunk is one call of the function that the page has for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cli.report.run_reader import ReadStage
from rl_distributed.metrics.sinks.jsonl import read_records
from rl_distributed.private_files import make_private_folder, private_opener

__all__ = ["SAMPLE_FILES", "ChunkStore", "index_samples", "script_json"]

SAMPLE_FILES = {"held-out": "validation_samples.jsonl"}
"""Files of answers in the folder of a stage, by what the page calls them."""
_CHUNK_BYTES = 1 << 18
_INLINE_BYTES = 1 << 20
_LONGEST_TEXT = 200_000
_TEXTS = ("prompt", "response", "dataset", "outcome", "answer")
_NUMBERS = ("reward", "group", "length", "advantage")
_ESCAPES = {
    ord("<"): "\\u003c",
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def script_json(value: Any) -> str:
    """Return JSON that may stand inside of a script of an HTML page.

    Nothing in it can end the script, begin a comment of HTML, or break a line.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


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

    @property
    def inline(self) -> Mapping[str, str]:
        """The chunks that stand inside the page, as JSON texts."""
        return self._held

    def _write(self, name: str, text: str) -> None:
        make_private_folder(self.folder)
        path = self.folder / f"chunk-{name}.js"
        with open(path, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(f"rlReport.chunk({json.dumps(name)},{text});\n")


@dataclass
class _StepIndex:
    """Where the answers of one step lie."""

    step: int
    first_chunk: int
    last_chunk: int = 0
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


def index_samples(
    stage: ReadStage, kind: str, key: str, store: ChunkStore
) -> dict[str, Any] | None:
    """Put the answers of a stage into chunks; return where those of a step lie.

    Args:
        stage: The stage.
        kind: Key of `SAMPLE_FILES`.
        key: Begins the names of the chunks.
        store: Gets the chunks.

    Returns:
        `steps`: rows of step, number of answers, mean reward (None without one), first
        and last chunk; None where the stage has none.
    """
    path = stage.folder / SAMPLE_FILES[kind]
    if not path.is_file():
        return None
    steps: list[_StepIndex] = []
    chunk: list[str] = []
    size = num_chunks = 0
    for record in _checked(path):
        if not steps or steps[-1].step != record["step"]:
            steps.append(_StepIndex(record["step"], num_chunks))
        _count(steps[-1], record, num_chunks)
        text = script_json(record)
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK_BYTES:
            store.add(f"{key}-{num_chunks}", chunk)
            num_chunks, size, chunk = num_chunks + 1, 0, []
    if chunk:
        store.add(f"{key}-{num_chunks}", chunk)
    if not steps:
        return None
    return {"kind": kind, "stage": stage.name, "key": key,
            "steps": [step.row() for step in steps]}  # fmt: skip


def _count(step: _StepIndex, record: Mapping[str, Any], chunk: int) -> None:
    step.count += 1
    step.last_chunk = chunk
    if "reward" in record:
        step.num_rewards += 1
        step.total_reward += record["reward"]


def _checked(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records with the fields that a page shows, each of the right type."""
    for record in read_records(path):
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        found: dict[str, Any] = {"step": step}
        for name in _TEXTS:
            if isinstance(text := record.get(name), str):
                found[name] = text[:_LONGEST_TEXT]
        for name in _NUMBERS:
            number = record.get(name)
            if isinstance(number, int | float) and math.isfinite(number):
                found[name] = number
        if (expected := record.get("expected")) is not None:
            found["expected"] = str(expected)[:_LONGEST_TEXT]
        found |= _conversation(record) | _tokens(record)
        yield found


def _conversation(record: Mapping[str, Any]) -> dict[str, Any]:
    messages = record.get("messages")
    if not isinstance(messages, list):
        return {}
    return {
        "messages": [
            [str(message.get("role", "")), str(message.get("content", ""))]
            for message in messages
            if isinstance(message, dict)
        ]
    }


def _tokens(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampled tokens with their log-probs, where both are there and fit."""
    tokens, logprobs = record.get("tokens"), record.get("logprobs")
    if not isinstance(tokens, list) or not isinstance(logprobs, list):
        return {}
    if len(tokens) != len(logprobs):
        return {}
    numbers = [
        round(p, 4) if isinstance(p, int | float) and math.isfinite(p) else None
        for p in logprobs
    ]
    return {"tokens": [str(token) for token in tokens], "logprobs": numbers}
