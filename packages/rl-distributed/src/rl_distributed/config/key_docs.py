"""Every key of a configuration class, with its type, default and documentation."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl_distributed.config.problems import show
from rl_distributed.config.schema import (
    MISSING,
    SchemaNode,
    change_mark,
    field_default,
)

__all__ = ["ConfigRow", "explain_config", "field_docs"]

_MAX_DEPTH = 12


@dataclass(frozen=True)
class ConfigRow:
    """One key of a configuration class."""

    path: str
    """The dotted key."""
    type: str
    """Its type, as one would write it."""
    default: str
    """Its default as YAML; empty for a section and for a required key."""
    required: bool
    """Whether it must be set."""
    doc: str
    """The docstring under the field, or the first line of the section's class."""
    rule: str = ""
    """The limits of its value, such as `at least 1`; empty where there are none."""
    changes: str = ""
    """Which of it may change while a program runs: `yes`, or keys of a mapping; empty:
    nothing."""


def explain_config(cls: type[BaseModel], prefix: str = "") -> list[ConfigRow]:
    """Rows for every key of `cls`, a section before its own keys."""
    return list(_rows(cls, None, prefix, 0))


def _rows(
    cls: type[BaseModel], instance: BaseModel | None, prefix: str, depth: int
) -> Iterator[ConfigRow]:
    if depth >= _MAX_DEPTH:
        return
    docs = field_docs(cls)
    for name, field in cls.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        models = SchemaNode.of(field.annotation).models
        default = field_default(field) if instance is None else getattr(instance, name)
        section = isinstance(default, BaseModel) or (default is MISSING and models)
        doc = docs.get(name) or inspect.cleandoc((models and models[0].__doc__) or "")
        yield ConfigRow(
            path=path,
            type=type_text(field.annotation),
            default="" if section or default is MISSING else show(_plain(default)),
            required=field.is_required(),
            doc=doc.split("\n\n")[0].replace("\n", " ") if models else doc,
            rule=_rule(field),
            changes=_changes(field),
        )
        for model in models:
            nested = default if isinstance(default, model) else None
            yield from _rows(model, nested, f"{path}.", depth + 1)


def type_text(annotation: Any) -> str:
    """Get a type annotation as short text: `int | null`, `"a" | "b"`, `list[str]`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is type(None):
        return "null"
    if origin is Annotated:
        return type_text(arguments[0])
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(item) for item in arguments)
    if origin is Literal:
        return " | ".join(show(item) for item in arguments)
    if origin is not None:
        inner = ", ".join(
            "..." if item is ... else type_text(item) for item in arguments
        )
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    name: str = getattr(annotation, "__name__", str(annotation))
    return name


_LIMITS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}


def _rule(field: FieldInfo) -> str:
    """Return the limits of a field in words."""
    return " and ".join(
        f"{words} {getattr(limit, name):g}"
        for limit in field.metadata
        for name, words in _LIMITS.items()
        if isinstance(getattr(limit, name, None), int | float)
    )


def _changes(field: FieldInfo) -> str:
    mark = change_mark(field)
    if isinstance(mark, list):
        return ", ".join(map(str, mark))
    return "yes" if mark else ""


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    return getattr(value, "value", value)


@functools.cache
def field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings under the fields, read from the source of the class."""
    docs: dict[str, str] = {}
    # Base classes first, so that a redeclared field has its newest text.
    for base in reversed(cls.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue  # a class without source, for example from a console
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        # Python discards docstrings under fields, so they are read from the source.
        for item, text in itertools.pairwise(body):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                doc = inspect.cleandoc(text.value.value)
                docs[item.target.id] = re.sub(r"\s*\n\s*", " ", doc)
    for name, field in cls.model_fields.items():
        if field.description:
            docs[name] = field.description
    return docs
