"""A NeMo RL recipe whose keys must each be used or accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_distributed.config import load_config
from rl_distributed.config.origins import plain_copy

__all__ = ["LeftOut", "TheirRecipe"]

NO_COUNTERPART = "has no counterpart here"
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A key or section that was dropped or changed."""

    key: str
    """Path of the key."""
    value: Any
    """Its value; for a section, the number of its keys."""
    why: str
    """Reason and, if there is one, a remedy."""

    def __str__(self) -> str:
        value = self.value
        # On one line: the entries are comments of a run file.
        shown = " ".join(value.split()) if isinstance(value, str) else repr(value)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}..."
        return f"{self.key} = {shown}: {self.why}"


class TheirRecipe:
    """The resolved keys of a recipe, with a record of those not used yet.

    Args:
        data: The whole recipe.
        folder: Folder of its file, to which paths in it may be relative.
    """

    def __init__(self, data: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        self.left_out: list[LeftOut] = []
        self._data = data
        self._open = dict(_leaves(data))

    @classmethod
    def read(cls, path: Path) -> TheirRecipe:
        """Read a YAML file with its `defaults`, resolving `${...}`.

        Raises:
            ConfigError: It cannot be read, or has a dangling reference.
        """
        return cls(plain_copy(load_config(path)), path.resolve().parent)

    def has(self, path: str) -> bool:
        """Return True if the key or section exists and is not null."""
        return self._find(path) is not None

    def peek(self, path: str, default: Any = None) -> Any:
        """Return the value at a path without marking it as used."""
        found = self._find(path)
        return default if found is None else found

    def take(self, path: str, default: Any = None) -> Any:
        """Return the value at a path, marking it and all keys below as used."""
        found = self._find(path)
        # Sections as well: taking one accounts for every key in it.
        for key in self._below(path):
            del self._open[key]
        return default if found is None else found

    def leave(self, path: str, why: str) -> None:
        """Drop a key, or the unused keys of a section, with a reason.

        Values without an effect, such as false and null, are not reported.
        """
        keys = self._below(path)
        asking = [key for key in keys if not _asks_nothing(self._open[key])]
        if len(asking) == 1:
            (key,) = asking
            self.left_out.append(LeftOut(key, self._open[key], why))
        elif asking:
            self.left_out.append(LeftOut(f"{path}.*", f"({len(asking)} keys)", why))
        for key in keys:
            del self._open[key]

    def change(self, path: str, why: str) -> None:
        """Mark a key as used whose value or meaning differs here."""
        self.left_out.append(LeftOut(path, self.peek(path), why))
        self.take(path)

    def leave_rest(self) -> None:
        """Report all unused keys."""
        for key, value in self._open.items():
            if not _asks_nothing(value):
                self.left_out.append(LeftOut(key, value, NO_COUNTERPART))
        self._open.clear()

    def _find(self, path: str) -> Any:
        value: Any = self._data
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    def _below(self, path: str) -> list[str]:
        return [k for k in self._open if k == path or k.startswith(f"{path}.")]


def _asks_nothing(value: Any) -> bool:
    """Return True if a value is missing or switches something off."""
    return value is None or value is False or value == {} or value == []


def _leaves(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        place = f"{path}.{key}" if path else str(key)
        # An empty mapping is a leaf, or its key would never be accounted for.
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, place)
        else:
            yield place, value
