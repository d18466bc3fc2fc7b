"""Rewriting the imports of scripts written for NeMo RL.

Names with the same interface are imported from their place here. Names with other
arguments are imported from `rl_algorithms.compat.nemo_rl`, which accepts the original
arguments, so that the script behaves as before; a note explains how to switch to the
native one. Names without a counterpart are left alone and reported.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rl_algorithms.compat.nemo_rl.name_map import (
    ROOT,
    MappedName,
    NameMap,
    read_name_map,
)
from rl_distributed.errors import ConfigError

__all__ = ["RewrittenScript", "rewrite_imports"]

_WIDTH = 88
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_MARK = "\ufeff"


@dataclass
class RewrittenScript:
    """A script with its imports rewritten."""

    path: Path
    before: str
    after: str
    notes: list[str] = field(default_factory=list)
    """Notes on rewritten names."""
    remaining: list[str] = field(default_factory=list)
    """Remaining uses of `nemo_rl`, with remedies."""

    def diff(self) -> str:
        """Return the changes as a unified diff; empty if there are none."""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            str(self.path),
            f"{self.path} (migrated)",
        )
        return "".join(lines)


def rewrite_imports(path: Path) -> RewrittenScript:
    """Rewrite the imports of a script without changing the file.

    Args:
        path: The script.

    Raises:
        ConfigError: It cannot be read, or is not Python.
    """
    try:
        # In bytes, so that line endings are preserved.
        text = path.read_bytes().decode("utf-8")
        tree = ast.parse(text.removeprefix(_MARK), str(path))
    except SyntaxError as error:
        raise ConfigError(
            f"{path}:{error.lineno} is not valid Python: {error.msg}; correct it first"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the script {path}: {error}") from error
    return _Rewriter(path, text, tree).rewritten()


class _Rewriter:
    def __init__(self, path: Path, text: str, tree: ast.Module) -> None:
        self._result = RewrittenScript(path, text, text)
        self._tree = tree
        self._names: NameMap = read_name_map()
        # Split like Python does; `splitlines` would also split at form feeds.
        self._lines = _LINE.findall(text)
        first = self._lines[0] if self._lines else "\n"
        self._newline = "\r\n" if first.endswith("\r\n") else "\n"

    def rewritten(self) -> RewrittenScript:
        """Replace the statements from last to first, to keep line numbers valid."""
        lines = list(self._lines)
        found = [node for node in ast.walk(self._tree) if _is_theirs(node)]
        # `ast.walk` goes level by level, not from top to bottom.
        found.sort(key=lambda node: getattr(node, "lineno", 0))
        replaced = [(node, self._statements(node)) for node in found]
        for node, statements in reversed(replaced):
            if statements is not None and isinstance(node, ast.stmt):
                end = node.end_lineno or node.lineno
                lines[node.lineno - 1 : end] = self._put(node, statements)
        self._result.after = "".join(lines)
        self._name_texts()
        return self._result

    def _statements(self, node: ast.AST) -> list[str] | None:
        """Return the replacement of an import; None: it stays."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _root(alias.name) == ROOT:
                    self._stays(node, f"import {alias.name}", "import its names")
            return None
        assert isinstance(node, ast.ImportFrom)
        module = node.module or ""
        if not self._stands_alone(node):
            self._stays(node, module, "give the import a line of its own")
            return None
        groups: dict[str, list[str]] = defaultdict(list)
        for alias in node.names:
            place = self._place(node, module, alias.name)
            imported = alias.name
            bound = alias.asname or alias.name
            if place is None:
                place = f"{module}.{imported}"
            home, _, imported = place.rpartition(".")
            text = imported if imported == bound else f"{imported} as {bound}"
            groups[home].append(text)
        # Nothing moved, so the statement keeps its own formatting.
        if list(groups) == [module]:
            return None
        return [_import(home, names, node.col_offset) for home, names in groups.items()]

    def _place(self, node: ast.stmt, module: str, name: str) -> str | None:
        """Return the new place of a name; None: it stays."""
        entry = self._names.find(module, name)
        if entry is None and self._names.has_module(f"{module}.{name}"):
            self._stays(node, f"{module}.{name}", "import its names")
            return None
        if entry is None or entry.absent:
            why = self._names.missing_name(module, name)
            self._result.remaining.append(f"line {node.lineno}: {why}")
            return None
        self._note(node, entry)
        return entry.via or entry.ours

    def _note(self, node: ast.stmt, entry: MappedName) -> None:
        if not entry.differs:
            return
        line = f"line {node.lineno}: {entry.name}: {entry.differs}"
        if entry.via:
            line = (
                f"line {node.lineno}: {entry.name} takes its old arguments; to switch "
                f"to {entry.ours}: {entry.differs}"
            )
        self._result.notes.append(line)

    def _stays(self, node: ast.stmt, what: str, remedy: str) -> None:
        self._result.remaining.append(
            f"line {node.lineno}: {what} stays: {remedy}, as in `from module import "
            "name`"
        )

    def _stands_alone(self, node: ast.stmt) -> bool:
        """Return True if only a comment shares the lines of a statement."""
        last = (node.end_lineno or node.lineno) - 1
        # Columns of the syntax tree count bytes, not characters.
        before = self._lines[node.lineno - 1].encode()[: node.col_offset].decode()
        after = self._lines[last].encode()[node.end_col_offset :].decode()
        return not before.strip() and after.strip()[:1] in ("", "#")

    def _put(self, node: ast.stmt, statements: list[str]) -> Iterator[str]:
        """Yield the new statements, below the comments of the replaced one."""
        last = node.end_lineno or node.lineno
        text = "".join(self._lines[node.lineno - 1 : last])
        indent = text[: len(text) - len(text.lstrip(" \t"))]
        for comment in _comments(text):
            yield f"{indent}{comment}{self._newline}"
        for statement in sorted(statements):
            for line in statement.splitlines():
                yield f"{indent}{line}{self._newline}"

    def _name_texts(self) -> None:
        """Report strings that name their classes, such as worker classes."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                module, _, name = node.value.rpartition(".")
                entry = self._names.find(module, name)
                if entry is not None:
                    self._result.remaining.append(
                        f"line {node.lineno}: the text {node.value!r} names a class of "
                        f"NeMo RL: {entry.ours or entry.absent}"
                    )


def _is_theirs(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and _root(node.module or "") == ROOT
    return isinstance(node, ast.Import) and any(
        _root(alias.name) == ROOT for alias in node.names
    )


def _root(module: str) -> str:
    return module.partition(".")[0]


def _import(home: str, names: list[str], indent: int) -> str:
    line = f"from {home} import {', '.join(names)}"
    if indent + len(line) <= _WIDTH:
        return line
    body = "".join(f"    {name},\n" for name in names)
    return f"from {home} import (\n{body})"


def _comments(text: str) -> list[str]:
    """Return the comments in the text of a statement."""
    # Tokenized alone, an indented statement would be an error.
    tokens = tokenize.generate_tokens(io.StringIO(text.lstrip()).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]
