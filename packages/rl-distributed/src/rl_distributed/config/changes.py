"""Change the keys of a configuration that may change while a program runs.

A field says so beside its limits: `Field(10, ge=0, json_schema_extra=changeable())`. Of
a field that is a mapping, single keys may be named: `changeable("lr")`. The changed
configuration is validated as the first one was, by the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from rl_distributed.config.base import Config
from rl_distributed.config.origins import KeyPath, dotted
from rl_distributed.config.problems import Problem, raise_problems
from rl_distributed.config.schema import (
    SchemaNode,
    UnknownKey,
    change_mark,
    suggest_key,
)
from rl_distributed.errors import ConfigError

__all__ = ["change_config", "changeable_keys", "flatten_changes", "value_at"]

ConfigT = TypeVar("ConfigT", bound=Config)


def changeable_keys(cls: type[BaseModel]) -> list[str]:
    """Return the dotted keys of a class that may change while a program runs."""
    return [dotted(path) for path in _marked(SchemaNode.of(cls), ())]


def flatten_changes(cls: type[BaseModel], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes by dotted key, those of sections and mappings one by one.

    `{"loop": {"period": 5}}` is `{"loop.period": 5}`.
    """
    root = SchemaNode.of(cls)
    return dict(_leaves(root, changes, ()))


def change_config(
    config: ConfigT,
    changes: Mapping[str, Any],
    *,
    by: str,
    allowed: Collection[str] | None = None,
) -> ConfigT:
    """Return a validated copy of a configuration with some keys changed.

    Args:
        config: The configuration; it stays as it is.
        changes: Values by dotted key, or by sections.
        by: What messages call the changes: `the update by alice`.
        allowed: The keys that may change, where a program takes fewer than are marked.

    Raises:
        ConfigError: There are none, a key is unknown or may not change, or the changed
            configuration breaks a rule. The message lists all of them.
    """
    flat = flatten_changes(type(config), changes)
    if not flat:
        raise ConfigError(f"{by} changes nothing: name a key and its new value")
    marked = changeable_keys(type(config))
    _check_keys(type(config), flat, by, marked if allowed is None else allowed)
    # Defaults are excluded, so that fields that were never set stay unset.
    tree = config.model_dump(mode="json", serialize_as_any=True, exclude_unset=True)
    for key, value in flat.items():
        _assign(tree, config, key.split("."), value)
    return type(config).from_dict(tree, source=by)


def value_at(config: BaseModel, key: str) -> Any:
    """Return the plain value of a dotted key; None below a section that is null."""
    value: Any = config
    for name in key.split("."):
        if isinstance(value, BaseModel):
            value = getattr(value, name)
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _check_keys(
    cls: type[BaseModel], flat: Mapping[str, Any], by: str, allowed: Collection[str]
) -> None:
    root = SchemaNode.of(cls)
    problems = []
    for key in flat:
        path = tuple(key.split("."))
        place = root.find(path)
        if isinstance(place, UnknownKey):
            meant = suggest_key(root, place)
            hint = f"; did you mean {meant!r}?" if meant else ""
            problems.append(Problem(place.path, f"is not a known key{hint}", by))
        elif key not in allowed:
            text = (
                "cannot change while the run goes on; what can: " + ", ".join(allowed)
                if allowed
                else "cannot change while the run goes on, and no other key can"
            )
            problems.append(Problem(path, text, by))
    if problems:
        raise_problems(problems, by)


def _marked(node: SchemaNode, prefix: KeyPath) -> Iterator[KeyPath]:
    for name, field in node.fields().items():
        path = (*prefix, name)
        mark = change_mark(field)
        if isinstance(mark, list):
            yield from ((*path, str(key)) for key in mark)
        elif mark:
            yield path
        below = SchemaNode.of(field.annotation)
        if below.models:
            yield from _marked(below, path)


def _leaves(
    node: SchemaNode | None, value: Mapping[str, Any], path: KeyPath
) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        below: SchemaNode | None = node
        # A key may itself be dotted, as on a command line.
        for name in str(key).split("."):
            below = below.child(name) if below is not None else None
        place = (*path, *str(key).split("."))
        inside = below is not None and (below.models or below.accepts_any_key)
        if isinstance(item, Mapping) and inside:
            yield from _leaves(below, item, place)
        else:
            yield ".".join(place), item


def _assign(tree: dict[str, Any], config: Any, path: list[str], value: Any) -> None:
    """Set a key in plain data that leaves out what has its default."""
    node, place = tree, config
    for name in path[:-1]:
        if isinstance(place, BaseModel):
            place = getattr(place, name)
        else:
            place = place.get(name) if isinstance(place, Mapping) else None
        if not isinstance(node.get(name), dict):
            # A mapping is one value, so the entries of its default stay in it.
            node[name] = dict(place) if isinstance(place, Mapping) else {}
        node = node[name]
    node[path[-1]] = value
