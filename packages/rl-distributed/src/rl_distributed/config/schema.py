"""Schema of a configuration class: its keys at any depth, and their defaults."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rl_distributed.config.origins import KeyPath
from rl_distributed.suggestion import nearest

__all__ = [
    "MISSING",
    "SchemaNode",
    "UnknownKey",
    "change_mark",
    "changeable",
    "number_keys",
    "suggest_key",
    "unknown_keys",
]

MISSING: Any = PydanticUndefined
"""Stands for "there is no default"."""

_FREE = (Any, object)
# Classes may contain themselves.
_MAX_DEPTH = 12


@dataclass(frozen=True)
class UnknownKey:
    """A key that the schema does not have, and the keys it has in that place."""

    path: KeyPath
    siblings: tuple[str, ...]
    """Empty where the key lies inside a value that is no section."""


@dataclass(frozen=True)
class SchemaNode:
    """A place in a configuration: the types that a value may have there."""

    types: tuple[Any, ...]
    """The members of the annotation's union, without None and `Annotated`."""

    @classmethod
    def of(cls, annotation: Any) -> SchemaNode:
        """Get the node of a type annotation, for example of a configuration class."""
        return cls(tuple(_members(annotation)))

    @property
    def models(self) -> tuple[type[BaseModel], ...]:
        """The configuration classes among the types."""
        return tuple(
            kind
            for kind in self.types
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        )

    @property
    def accepts_any_key(self) -> bool:
        """Whether keys are free here: a mapping type or `Any`."""
        return any(
            kind in _FREE or _mapping_value(kind) is not None for kind in self.types
        )

    def fields(self) -> dict[str, FieldInfo]:
        """Get the fields of all configuration classes that may stand here, by key."""
        return {
            info.alias or name: info
            # In a union of classes, the first one takes precedence.
            for model in reversed(self.models)
            for name, info in model.model_fields.items()
        }

    def child(self, key: str) -> SchemaNode | None:
        """Return the place under `key`, or None where the schema has no such key."""
        field = self.fields().get(key)
        if field is not None:
            return SchemaNode.of(field.annotation)
        for kind in self.types:
            if kind in _FREE:
                return SchemaNode((Any,))
            value = _mapping_value(kind)
            # A number may be an index into a list.
            if value is None and key.isdecimal():
                value = _item_type(kind)
            if value is not None:
                return SchemaNode.of(value)
        return None

    def find(self, path: KeyPath) -> SchemaNode | UnknownKey:
        """Get the place at `path`, or the first key on the way that does not exist."""
        node = self
        for depth, key in enumerate(path):
            below = node.child(key)
            if below is None:
                return UnknownKey(path[: depth + 1], tuple(node.fields()))
            node = below
        return node

    def default(self, path: KeyPath) -> Any:
        """Return the default of the value at `path`; `MISSING` where it has none."""
        if not path:
            return MISSING
        field = self.fields().get(path[0])
        if field is None:
            return MISSING
        value = field_default(field)
        if value is MISSING:
            return SchemaNode.of(field.annotation).default(path[1:])
        for key in path[1:]:
            if isinstance(value, BaseModel) and key in type(value).model_fields:
                value = getattr(value, key)
            elif isinstance(value, Mapping) and key in value:
                value = value[key]
            else:
                return MISSING
        return value.model_dump(mode="json") if isinstance(value, BaseModel) else value

    def walk(
        self, prefix: KeyPath = (), depth: int = 0
    ) -> Iterator[tuple[KeyPath, SchemaNode]]:
        """Every key of the schema with its place, sections before their content."""
        if depth >= _MAX_DEPTH:
            return
        for key, field in self.fields().items():
            node = SchemaNode.of(field.annotation)
            yield (*prefix, key), node
            yield from node.walk((*prefix, key), depth + 1)


def field_default(field: FieldInfo) -> Any:
    """Return the default of a field, made by its factory if need be, or `MISSING`."""
    if field.default_factory is not None and field.default_factory_takes_validated_data:
        return MISSING
    return field.get_default(call_default_factory=True, validated_data=None)


def changeable(*keys: str) -> JsonDict:
    """Mark a field, as its `json_schema_extra`, as one that may change meanwhile.

    Args:
        keys: Of a mapping, which of its keys; none: the whole field.
    """
    return {"changeable": list(keys) or True}


def change_mark(field: FieldInfo) -> bool | list[Any]:
    """Return whether a field is marked as changeable, or which keys of it are."""
    extra = field.json_schema_extra
    mark = extra.get("changeable", False) if isinstance(extra, dict) else False
    return mark if isinstance(mark, list) else bool(mark)


def unknown_keys(
    node: SchemaNode, data: Any, prefix: KeyPath = ()
) -> Iterator[UnknownKey]:
    """Every key of `data`, at any depth, that the schema does not have."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            path = (*prefix, str(key))
            child = node.child(str(key))
            if child is not None:
                yield from unknown_keys(child, value, path)
            elif node.models:
                yield UnknownKey(path, tuple(node.fields()))
    elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
        for index, value in enumerate(data):
            child = node.child(str(index))
            if child is not None:
                yield from unknown_keys(child, value, (*prefix, str(index)))


def number_keys(
    node: SchemaNode, data: Any, prefix: KeyPath = ()
) -> Iterator[UnknownKey]:
    """Every key of a section that is no text: YAML reads `1` and `null` as values."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            # Most are texts with a plain value, and need no look-up.
            if isinstance(key, str) and not isinstance(value, Mapping | list | tuple):
                continue
            path, child = (*prefix, str(key)), node.child(str(key))
            if node.models and child is None and not isinstance(key, str):
                yield UnknownKey(path, tuple(node.fields()))
            elif child is not None:
                yield from number_keys(child, value, path)
    elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
        for index, value in enumerate(data):
            child = node.child(str(index))
            if child is not None:
                yield from number_keys(child, value, (*prefix, str(index)))


def suggest_key(root: SchemaNode, unknown: UnknownKey) -> str | None:
    """Get the key that was most likely meant: a sibling, or the same name elsewhere."""
    parent, name = unknown.path[:-1], unknown.path[-1]
    found = nearest(name, unknown.siblings)
    if found is not None:
        return ".".join((*parent, found))
    # Putting a valid key into the wrong section is a common slip.
    elsewhere = [".".join(path) for path, _ in root.walk() if path[-1] == name]
    return elsewhere[0] if elsewhere else None


def _members(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif isinstance(annotation, TypeVar):
        yield Any
    elif hasattr(annotation, "__value__"):  # `type X = ...`
        yield from _members(annotation.__value__)
    elif annotation is not None and annotation is not type(None):
        yield annotation


def _mapping_value(kind: Any) -> Any:
    """Return the type of the values of a mapping type, or None for other types."""
    origin = get_origin(kind) or kind
    if typing.is_typeddict(origin):
        return Any
    if isinstance(origin, type) and issubclass(origin, Mapping):
        arguments = get_args(kind)
        return arguments[1] if len(arguments) == 2 else Any
    return None


def _item_type(kind: Any) -> Any:
    """Return the type of the items of a sequence type, or None for other types."""
    origin = get_origin(kind) or kind
    if not isinstance(origin, type) or issubclass(origin, str | bytes):
        return None
    if issubclass(origin, Sequence | set | frozenset):
        arguments = [item for item in get_args(kind) if item is not Ellipsis]
        return Union.__getitem__(tuple(arguments)) if arguments else Any
    return None
