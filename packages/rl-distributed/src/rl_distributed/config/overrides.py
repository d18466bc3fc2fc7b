"""Overrides of the command line: `key=value`, `+key=value`, `++key=value`, `~key`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rl_distributed.config.origins import (
    MOST_LEVELS,
    REPLACE_MARKER,
    ConfigDocument,
    KeyPath,
    dotted,
    merge_configs,
    plain_copy,
)
from rl_distributed.config.override_value import parse_value
from rl_distributed.config.problems import Problem, raise_problems
from rl_distributed.config.schema import (
    MISSING,
    SchemaNode,
    UnknownKey,
    suggest_key,
    unknown_keys,
)
from rl_distributed.errors import ConfigError
from rl_distributed.suggestion import nearest

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["Override", "apply_overrides", "parse_overrides"]

Action: TypeAlias = Literal["set", "add", "force", "delete"]

_SHAPE = "write key=value, +key=value (new key), ++key=value (either) or ~key (remove)"
# Overrides may be of any length, but messages may not.
_LONGEST_SHOWN = 200
_KEY_DOT = re.compile(r"(?<!\\)\.")


@dataclass(frozen=True)
class Override:
    """One override, parsed."""

    action: Action
    path: KeyPath
    value: Any
    """`MISSING` for `~key` without a value."""
    text: str
    """As it was written."""

    @property
    def origin(self) -> str:
        """Name of this override in messages."""
        return f"override {self.text!r}"


def parse_overrides(texts: Iterable[str]) -> list[Override]:
    r"""Parse overrides; every malformed one is reported in one `ConfigError`.

    Values are typed as in YAML 1.2 (`3`, `1e-5`, `true`, `null`), `[a,b]` is a list,
    `{a:1,b:2}` a mapping, quotes (single or double) make a string, and `${a.b}` is
    resolved with the rest of the configuration. A dot in a key is written `\.`.
    """
    # A string is a sequence too: each letter would be parsed as an override.
    if isinstance(texts, str):
        raise ConfigError(f"overrides must be a list of strings: got {texts!r}")
    parsed: list[Override] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            parsed.append(_parse(text))
        except ConfigError as error:
            shown = repr(text)
            if len(shown) > _LONGEST_SHOWN:
                shown = f"{shown[:_LONGEST_SHOWN]}..."
            problems.append(Problem((), f"override {shown}: {error}"))
    if problems:
        raise_problems(problems, "the overrides")
    return parsed


def _parse(text: str) -> Override:
    if not isinstance(text, str):
        raise ConfigError(f"must be a string; {_SHAPE}")
    body = text.strip()
    action: Action = "set"
    for sign, meaning in (("++", "force"), ("+", "add"), ("~", "delete")):
        if body.startswith(sign):
            action, body = meaning, body[len(sign) :]  # type: ignore[assignment]
            break
    # Most likely an option of the command, given after the overrides.
    if body.startswith("-"):
        raise ConfigError(f"looks like an option, not like a key; {_SHAPE}")
    key, equals, value = body.partition("=")
    if not equals and action != "delete":
        raise ConfigError(f"has no '='; {_SHAPE}")
    path = tuple(part.replace("\\.", ".") for part in _KEY_DOT.split(key.strip()))
    # Each part of a key becomes a section.
    if len(path) >= MOST_LEVELS:
        raise ConfigError(f"the key has more than {MOST_LEVELS} parts")
    if not all(path) or any(re.search(r"[\s\[\]{}'\"]", part) for part in path):
        raise ConfigError(f"{key!r} is no dotted key; {_SHAPE}")
    return Override(action, path, parse_value(value) if equals else MISSING, text)


def apply_overrides(
    data: Mapping[str, Any],
    overrides: Iterable[Override],
    schema: type[BaseModel] | None = None,
) -> ConfigDocument:
    """Return a copy of `data` with `overrides` applied in order.

    `key=value` sets a key that exists, in the data or in `schema`; `+key=value` adds
    one that is not in the data; `++key=value` does either; `~key` removes one (with
    `~key=value` only if it has that value). A mapping merges into the section that is
    there, unless it holds `_override_: true`. With `schema`, a key that the schema
    does not have is an error for every form.

    Raises:
        ConfigError: Lists all overrides that cannot be applied.
    """
    # A copy, because the data belong to the caller.
    document = merge_configs({}, data)
    root = SchemaNode.of(schema) if schema is not None else None
    problems: list[Problem] = []
    for override in overrides:
        # Checked before it is applied, so that a typo leaves nothing in the data.
        found = _check_schema(root, override) if root is not None else []
        if not found:
            try:
                document = _ACTIONS[override.action](document, override, root)
            except _RefusedError as refused:
                path = refused.path or override.path
                found = [Problem(path, str(refused), override.origin)]
        # Collected, so that one run reports all mistakes.
        problems.extend(found)
    if problems:
        raise_problems(problems, "the overrides")
    return document


class _RefusedError(Exception):
    """An override cannot be applied; the message completes "<key> ..."."""

    def __init__(self, text: str, path: KeyPath | None = None) -> None:
        super().__init__(text)
        self.path = path


def _check_schema(root: SchemaNode, override: Override) -> list[Problem]:
    place = root.find(override.path)
    unknown = [place] if isinstance(place, UnknownKey) else []
    if isinstance(place, SchemaNode):
        value = plain_copy(override.value)
        unknown = list(unknown_keys(place, value, override.path))
    return [
        Problem(item.path, _unknown_text(root, item), override.origin)
        for item in unknown
    ]


def _unknown_text(root: SchemaNode, unknown: UnknownKey) -> str:
    meant = suggest_key(root, unknown)
    if meant:
        return f"is not a known key; did you mean {meant!r}?"
    if not unknown.siblings:
        return f"is not a known key: {dotted(unknown.path[:-1])} has no keys of its own"
    return f"is not a known key; known keys: {', '.join(unknown.siblings)}"


def _lookup(document: ConfigDocument, path: KeyPath) -> Any:
    node: Any = document
    for key in path:
        node = _child(node, key)
        if node is MISSING:
            return MISSING
    return node


def _child(node: Any, key: str) -> Any:
    if isinstance(node, Mapping):
        return node.get(_real_key(node, key), MISSING)
    if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        return node[int(key)]
    return MISSING


def _real_key(section: Mapping[Any, Any], key: str) -> Any:
    """Return the key of `section` that is written `key`; YAML keys can be numbers."""
    if key in section:
        return key
    return next((name for name in section if str(name) == key), key)


def _set(
    document: ConfigDocument, override: Override, root: SchemaNode | None
) -> ConfigDocument:
    # With a schema, the key has already been checked against it.
    if root is None:
        _require_present(document, override.path, override.value)
    return _assign(document, override, root)


def _add(
    document: ConfigDocument, override: Override, root: SchemaNode | None
) -> ConfigDocument:
    if _lookup(document, override.path) is not MISSING:
        key = dotted(override.path)
        raise _RefusedError(f"is set already; use {key}=... or ++{key}=...")
    return _assign(document, override, root)


def _assign(
    document: ConfigDocument, override: Override, root: SchemaNode | None
) -> ConfigDocument:
    section: Any = document
    for depth, key in enumerate(override.path[:-1], start=1):
        path = override.path[:depth]
        below = _child(section, key)
        # A null section counts as absent: setting a key below it shows
        # that it is wanted.
        if below is MISSING or below is None:
            below = _fresh_section(root, path)
            _put(section, key, below)
            document.origins[path] = override.origin
        elif not isinstance(below, dict | list):
            raise _RefusedError(
                f"cannot be set: {dotted(path)} is {below!r}, no section"
            )
        section = below
    key = override.path[-1]
    present, value = _child(section, key), override.value
    if isinstance(present, dict) and isinstance(value, Mapping):
        _forget_replaced(document, override.path, value)
        value = dict(merge_configs(present, value))
    else:
        value = plain_copy(value)
        document.forget_origins(override.path)
    _put(section, key, value)
    document.origins[override.path] = override.origin
    return document


def _forget_replaced(
    document: ConfigDocument, path: KeyPath, value: Mapping[str, Any]
) -> None:
    """Forget where the keys were written that a mapping sets in a section."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            _forget_replaced(document, (*path, str(key)), item)
            document.origins.pop((*path, str(key)), None)
        else:
            document.forget_origins((*path, str(key)))


def _fresh_section(root: SchemaNode | None, path: KeyPath) -> dict[str, Any]:
    """Return a new section; one with free keys starts from the schema's default."""
    place = root.find(path) if root is not None else None
    if root is not None and isinstance(place, SchemaNode) and place.accepts_any_key:
        default = root.default(path)
        if isinstance(default, Mapping):
            return dict(plain_copy(default))
    return {}


def _put(section: Any, key: str, value: Any) -> None:
    if isinstance(section, dict):
        section[_real_key(section, key)] = value
        return
    if not key.isdecimal() or int(key) >= len(section):
        raise _RefusedError(
            f"cannot be set: {key!r} is no index into a list of {len(section)} items"
        )
    section[int(key)] = value


def _delete(
    document: ConfigDocument, override: Override, root: SchemaNode | None
) -> ConfigDocument:
    path, value = override.path, override.value
    present = _lookup(document, path)
    if present is MISSING:
        default = " (it has its default)" if root is not None else ""
        raise _RefusedError(f"cannot be removed: it is not set{default}")
    if value is not MISSING and present != value:
        raise _RefusedError(f"is not removed: its value is {present!r}, not {value!r}")
    section = _lookup(document, path[:-1])
    if isinstance(section, list):
        del section[int(path[-1])]
    else:
        del section[_real_key(section, path[-1])]
    document.forget_origins(path)
    return document


def _require_present(document: ConfigDocument, path: KeyPath, value: Any) -> None:
    """Without a schema, `key=value` may only name keys that are in the data."""
    node: Any = document
    for depth, key in enumerate(path, start=1):
        below = _child(node, key)
        if below is MISSING:
            if not isinstance(node, dict | list):
                above = dotted(path[: depth - 1])
                raise _RefusedError(f"cannot be set: {above} is {node!r}, no section")
            found = nearest(key, map(str, node)) if isinstance(node, dict) else None
            meant = dotted((*path[: depth - 1], found)) if found else None
            hint = f"did you mean {meant!r}? To" if meant else "to"
            raise _RefusedError(
                f"is not a known key; {hint} add it, write +{dotted(path)}=...",
                path[:depth],
            )
        node = below
    merges = isinstance(value, Mapping) and value.get(REPLACE_MARKER) is not True
    if merges and isinstance(node, Mapping) and node:
        for key, item in value.items():
            if key != REPLACE_MARKER:
                _require_present(document, (*path, str(key)), item)


_ACTIONS: Mapping[
    Action,
    Callable[[ConfigDocument, Override, SchemaNode | None], ConfigDocument],
] = {"set": _set, "add": _add, "force": _assign, "delete": _delete}
