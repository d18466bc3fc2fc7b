"""Configuration data before validation: a dict that knows where each key came from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeAlias

from rl_distributed.errors import ConfigError

__all__ = [
    "MOST_LEVELS",
    "ConfigDocument",
    "KeyPath",
    "check_depth",
    "dotted",
    "merge_configs",
    "plain_copy",
]

KeyPath: TypeAlias = tuple[str, ...]

REPLACE_MARKER = "_override_"
"""With `true` under this key, a mapping replaces what it would merge into."""


MOST_LEVELS = 100
"""Limit on the nesting of lists and mappings; Python's own is some 1,000 calls."""


class ConfigDocument(dict[str, Any]):
    """A plain dict with, beside it, the origin of every key.

    `origins` maps a key path to text such as `recipe.yaml:12` or
    `override 'seed=3'`. It has no influence on equality or on the data.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | None = None,
        origins: Mapping[KeyPath, str] | None = None,
    ) -> None:
        super().__init__(data or {})
        if origins is None and isinstance(data, ConfigDocument):
            origins = data.origins
        self.origins: dict[KeyPath, str] = dict(origins or {})

    def origin(self, path: KeyPath) -> str | None:
        """Return where the key at `path`, or its nearest section, was written."""
        # An override has a single origin, that of its own key.
        for end in range(len(path), 0, -1):
            found = self.origins.get(path[:end])
            if found is not None:
                return found
        return None

    def forget_origins(self, path: KeyPath) -> None:
        """Drop the origins of `path` and of all below it."""
        depth = len(path)
        # Collected first, because the loop changes the mapping.
        for known in [known for known in self.origins if known[:depth] == path]:
            del self.origins[known]

    def section(self, path: KeyPath) -> ConfigDocument:
        """Copy the section at `path`, with origins; empty where there is none."""
        node: Any = self
        for key in path:
            node = node.get(key) if isinstance(node, Mapping) else None
        section = plain_copy(node) if isinstance(node, Mapping) else {}
        depth, around = len(path), self.origin(path)
        origins = {
            known[depth:]: origin
            for known, origin in self.origins.items()
            if known[:depth] == path and len(known) > depth
        }
        if around is not None:
            origins = {(str(key),): around for key in section} | origins
        return ConfigDocument(section, origins)

    def put_section(self, path: KeyPath, section: ConfigDocument) -> None:
        """Replace the section at `path`, with its origins; those around it exist."""
        node: Any = self
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = plain_copy(section)
        self.forget_origins(path)
        for below, origin in section.origins.items():
            self.origins[(*path, *below)] = origin


def dotted(path: KeyPath) -> str:
    """`a.b.c`, with the dots inside a key escaped."""
    return ".".join(str(part).replace(".", "\\.") for part in path)


def check_depth(data: Mapping[str, Any], source: str) -> None:
    """Refuse data that nest too deep, or hold themselves.

    Args:
        data: Nested mappings and lists.
        source: What messages call it.

    Raises:
        ConfigError: They nest more than `MOST_LEVELS` levels; it names the key.
    """
    # Iterative, because deep data would exceed the recursion limit.
    waiting: list[tuple[str, Any, int]] = [
        (str(key), value, 1) for key, value in data.items()
    ]
    while waiting:
        key, value, level = waiting.pop()
        if isinstance(value, Mapping):
            value = value.values()
        elif not isinstance(value, list | tuple):
            continue
        if level >= MOST_LEVELS:
            raise ConfigError(
                f"{key} in {source} nests more than {MOST_LEVELS} levels, or holds "
                "itself; write it flatter"
            )
        waiting.extend((key, item, level + 1) for item in value)


def plain_copy(value: Any) -> Any:
    """Return a deep copy of nested mappings and lists, without replace markers."""
    if isinstance(value, Mapping):
        return {
            key: plain_copy(item)
            for key, item in value.items()
            if key != REPLACE_MARKER
        }
    if isinstance(value, list | tuple):
        return [plain_copy(item) for item in value]
    # Other objects of a program must not be shared either.
    return copy.deepcopy(value)


def replaces(section: Mapping[str, Any], path: KeyPath, origin: str | None) -> bool:
    """Whether `section` carries the replace marker; it must be a boolean."""
    marker = section.get(REPLACE_MARKER, False)
    if not isinstance(marker, bool):
        where = dotted((*path, REPLACE_MARKER))
        raise ConfigError(
            f"{where} must be true or false: got {marker!r}"
            + (f" ({origin})" if origin else "")
        )
    return marker


def merge_configs(base: Mapping[str, Any], extra: Mapping[str, Any]) -> ConfigDocument:
    """Return a new document: `base` with `extra` merged over it.

    Mappings merge key by key, everything else (lists too) is replaced. A mapping in
    `extra` that holds `_override_: true` replaces the one in `base` as a whole.
    """
    for data in (base, extra):
        check_depth(data, "the configuration")
    extra_document = ConfigDocument(extra)
    base_document = ConfigDocument(base)
    if replaces(extra, (), extra_document.origin((REPLACE_MARKER,))):
        result = ConfigDocument(plain_copy(extra), {})
    else:
        result = ConfigDocument(plain_copy(base), base_document.origins)
        _merge_into(result, extra, (), result, extra_document)
    result.origins.update(
        (path, origin)
        for path, origin in extra_document.origins.items()
        if path[-1] != REPLACE_MARKER
    )
    return result


def _merge_into(
    target: dict[str, Any],
    extra: Mapping[str, Any],
    path: KeyPath,
    result: ConfigDocument,
    origins: ConfigDocument,
) -> None:
    for key, value in extra.items():
        if key == REPLACE_MARKER:
            continue
        child = (*path, str(key))
        present = target.get(key)
        if (
            isinstance(present, dict)
            and isinstance(value, Mapping)
            and not replaces(value, child, origins.origin((*child, REPLACE_MARKER)))
        ):
            _merge_into(present, value, child, result, origins)
        else:
            # Keys that were replaced must not keep their origins.
            result.forget_origins(child)
            target[key] = plain_copy(value)
