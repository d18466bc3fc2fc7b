"""Explanations of configuration keys, found by their path or the end of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.text import Text

from rl_algorithms.presets import find_preset
from rl_algorithms.registry import (
    algorithm_names,
    algorithm_settings,
    get_config_class,
)
from rl_algorithms.trainers.settings.keywords import changeable_in
from rl_cli.recipe_files import recipe_path
from rl_cli.run_config import load_run
from rl_distributed.config import ConfigRow, explain_config
from rl_distributed.errors import ConfigError
from rl_distributed.suggestion import did_you_mean

__all__ = ["Entry", "Explained", "find_entries"]

_INDENT = (0, 0, 0, 4)


@dataclass(frozen=True)
class Entry:
    """A key and its owners."""

    row: ConfigRow
    owners: tuple[str, ...]
    """Algorithms, or stages of a recipe, that have the key."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        row = self.row
        return {
            "path": row.path,
            "type": row.type,
            "default": row.default,
            "rule": row.rule,
            "changes": row.changes,
            "required": row.required,
            "doc": row.doc,
            "of": list(self.owners),
        }


def find_entries(names: Sequence[str]) -> list[Entry]:
    """Find the entries to explain.

    Args:
        names: An algorithm, preset or recipe, followed by keys, or keys alone. A key is
            given by its path, or the end of it, such as `optimizer.name`; a section
            stands for all keys below it.

    Raises:
        UserError: There is no such algorithm or key.
    """
    first, *keys = names
    if first in algorithm_names() or find_preset(first) is not None:
        entries = _merged({first: _rows_of(first)})
    elif recipe_path(first) is not None:
        stages = load_run(first, None, ()).stages
        entries = _merged({s.name: _rows_of(s.algorithm) for s in stages})
    else:
        entries = _merged({name: _rows_of(name) for name in algorithm_names()})
        keys = list(names)
    if not keys:
        return entries
    return [entry for key in keys for entry in _of_key(key, entries)]


def _rows_of(name: str) -> list[ConfigRow]:
    preset = algorithm_settings(name)
    config_class = get_config_class(name)
    live = changeable_in(config_class)
    return [
        replace(
            row,
            default=_default(row, preset),
            changes=row.changes if _is_above(row.path, live) else "",
        )
        for row in explain_config(config_class)
    ]


def _is_above(path: str, keys: Sequence[str]) -> bool:
    """Return True if a path is one of these keys, or a mapping that contains one."""
    return any(f"{key}.".startswith(f"{path}.") for key in keys)


def _default(row: ConfigRow, preset: Mapping[str, Any]) -> str:
    """Return the default of a key, from the preset if it has one."""
    value: Any = preset
    for key in row.path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return row.default
        value = value[key]
    return row.default if isinstance(value, Mapping) else json.dumps(value)


def _merged(rows: Mapping[str, Sequence[ConfigRow]]) -> list[Entry]:
    """Merge rows that are equal for several owners."""
    found: dict[ConfigRow, list[str]] = {}
    for owner, own in rows.items():
        for row in own:
            # Equal rows only: a default that differs between algorithms gets an entry
            # of its own.
            found.setdefault(row, []).append(owner)
    return [Entry(row, tuple(owners)) for row, owners in found.items()]


def _of_key(key: str, entries: Sequence[Entry]) -> list[Entry]:
    paths = {entry.row.path for entry in entries}
    if key not in paths:
        ends = {path for path in paths if path.endswith(f".{key}")}
        if not ends:
            names = {path.rpartition(".")[2] for path in paths}
            hint = did_you_mean(key, names) or did_you_mean(key, paths)
            raise ConfigError(
                f"there is no algorithm, preset, recipe or key {key!r}"
                f"{hint or '; rl config explain grpo lists the keys of grpo'}"
            )
    else:
        ends = {key}
    below = tuple(f"{path}." for path in ends)
    return [e for e in entries if e.row.path in ends or e.row.path.startswith(below)]


class Explained:
    """A listing of keys, in which no path is broken into lines.

    Args:
        entries: The entries to show.
        with_owners: Also show the owners of each key.
    """

    def __init__(self, entries: Sequence[Entry], *, with_owners: bool) -> None:
        self._entries, self._with_owners = entries, with_owners

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Render the keys one below the other."""
        for entry in self._entries:
            # Folded, not broken at words: a path is copied as a whole.
            yield Text(entry.row.path, style="bold", overflow="fold")
            for line in self._lines(entry):
                yield Padding(Text(line, overflow="fold"), _INDENT, expand=False)

    def _lines(self, entry: Entry) -> Iterator[str]:
        row = entry.row
        facts = [row.type]
        if row.rule:
            facts.append(row.rule)
        if row.required:
            facts.append("required")
        elif row.default:
            facts.append(f"default {row.default}")
        if row.changes:
            what = "" if row.changes == "yes" else f"{row.changes} "
            facts.append(f"{what}may change during a run")
        yield "; ".join(facts)
        if row.doc:
            yield row.doc
        if self._with_owners:
            yield f"of {', '.join(entry.owners)}"
