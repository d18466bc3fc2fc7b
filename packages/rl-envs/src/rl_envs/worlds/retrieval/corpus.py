"""Documents to search: a folder, a JSON Lines file, or rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_distributed.errors import ConfigError

__all__ = ["Document", "read_corpus"]

_SUFFIXES = (".md", ".txt")
_TEXT_KEYS = ("text", "contents", "body")


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a title."""

    title: str
    text: str


def read_corpus(source: str | Path | Sequence[Mapping[str, Any]]) -> list[Document]:
    """Read the documents of a corpus, in a fixed order.

    Args:
        source: A folder, whose `.txt` and `.md` files are documents titled by their
            path; a JSON Lines file, or its rows: objects with `text` (or `contents`, or
            `body`) and optionally `title`. Without a title, it is the first line.

    Raises:
        ConfigError: It cannot be read, or holds no document.
    """
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        found = _of_folder(path) if path.is_dir() else _of_file(path)
        name = str(path)
    else:
        found = [_of_row(row, f"corpus[{i}]") for i, row in enumerate(source)]
        name = "corpus"
    if not found:
        raise ConfigError(f"{name} must hold at least one document: found none")
    return found


def _of_folder(folder: Path) -> list[Document]:
    # Sorted: the order in which a file system lists files differs between machines.
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES)
    return [
        Document(str(path.relative_to(folder).with_suffix("")), _text_of(path))
        for path in paths
        if path.is_file()
    ]


def _of_file(path: Path) -> list[Document]:
    found = []
    # Not splitlines: JSON texts may hold U+2028 and other ends of lines as they are.
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number} must be JSON: {error}") from None
        found.append(_of_row(row, f"{path}:{number}"))
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"corpus {path} cannot be read: {error}") from error


def _of_row(row: Any, where: str) -> Document:
    given = row if isinstance(row, Mapping) else {}
    text = next((given[key] for key in _TEXT_KEYS if key in given), None)
    title = given.get("title", "")
    if not isinstance(text, str) or not isinstance(title, str) or not text.strip():
        raise ConfigError(
            f"{where} must have a column 'text' with a text, and may have 'title': got "
            f"{row!r:.80}"
        )
    if not title:
        # Corpora of question answering put the title into the first line.
        title, _, rest = text.strip().partition("\n")
        text = rest or text
    return Document(title.strip('" '), text.strip())
