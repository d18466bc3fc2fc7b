"""Turn what is wrong with a configuration into one message that names every place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rl_distributed.config.origins import ConfigDocument, KeyPath, dotted
from rl_distributed.config.schema import (
    SchemaNode,
    number_keys,
    suggest_key,
    unknown_keys,
)
from rl_distributed.errors import ConfigError
from rl_distributed.suggestion import did_you_mean

__all__ = [
    "Problem",
    "describe_problems",
    "raise_problems",
    "refuse_number_keys",
    "show",
]

_EXPECTED = {
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of fewer digits",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "none_required": "must be null",
}
_PLAIN = {
    "input should": "must",
    "Input": "input",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
_LONGEST_VALUE = 80
_KEY = re.compile(r"[A-Za-z_][\w.]*")
_PREDICATES = ("belongs", "gives", "has", "is", "must", "needs", "takes")
"""A message that begins with one has its path as its subject."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where it is, and where it was written."""

    path: KeyPath
    message: str
    origin: str | None = None
    joint: str = " "
    """What stands between the path and the message: "." where that goes on with a key
    below the path, ": " where it is a sentence about several."""

    def __str__(self) -> str:
        where = f"{dotted(self.path)}{self.joint}" if self.path else ""
        return where + self.message + (f" ({self.origin})" if self.origin else "")


def show(value: Any) -> str:
    """Return a value as it would be written in YAML, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        # For objects that have no JSON form.
        text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def raise_problems(problems: Sequence[Problem], source: str) -> NoReturn:
    """Raise one `ConfigError` that lists all `problems`."""
    if len(problems) == 1:
        raise ConfigError(str(problems[0]))
    lines = "".join(f"\n  - {problem}" for problem in problems)
    raise ConfigError(f"{len(problems)} problems in {source}:{lines}")


def refuse_number_keys(
    cls: type[BaseModel], data: Mapping[str, Any], source: str | None
) -> None:
    """Refuse sections with keys that are no texts, which pydantic cannot name.

    Raises:
        ConfigError: There are some; it names them.
    """
    document = ConfigDocument(data)
    problems = [
        Problem(
            unknown.path,
            f"is not a known key{_known(unknown.siblings)}",
            document.origin(unknown.path) or source,
        )
        for unknown in number_keys(SchemaNode.of(cls), data)
    ]
    if problems:
        raise_problems(problems, source or cls.__name__)


def describe_problems(
    cls: type[BaseModel],
    data: Mapping[str, Any],
    error: ValidationError,
    source: str | None,
) -> list[Problem]:
    """All unknown keys of `data` and all other errors that pydantic found in it."""
    document = ConfigDocument(data)
    root = SchemaNode.of(cls)
    problems: dict[KeyPath, list[Problem]] = {}
    suggested: set[str] = set()
    for unknown in unknown_keys(root, data):
        meant = suggest_key(root, unknown)
        # The intended key is then missing as well and is not reported twice.
        suggested.add(meant or "")
        hint = f"; did you mean {meant!r}?" if meant else _known(unknown.siblings)
        origin = document.origin(unknown.path) or source
        problem = Problem(unknown.path, f"is not a known key{hint}", origin)
        problems[unknown.path] = [problem]
    for details in error.errors(include_url=False):
        path = _path_in_data(root, details, data)
        forgiven = details["type"] == "missing" and ".".join(path) in suggested
        listed = details["type"] == "extra_forbidden" and path in problems
        if listed or forgiven:
            continue
        # A missing key was not written anywhere.
        origin = document.origin(path) if details["type"] != "missing" else None
        joint, message = _joined(root, path, _message(details))
        problem = Problem(path, message, origin or source, joint)
        # Grouped by place, because each member of a union reports its own error.
        problems.setdefault(path, []).append(problem)
    return [_combine(group) for group in problems.values()]


def _known(names: Sequence[str]) -> str:
    return f"; known keys: {', '.join(names)}" if names else ""


def _combine(group: Sequence[Problem]) -> Problem:
    """One problem for the several that a union type yields for the same place."""
    messages = list(dict.fromkeys(problem.message for problem in group))
    first = group[0]
    if len(messages) == 1:
        return first
    return Problem(first.path, ", or ".join(messages), first.origin, first.joint)


def _joined(root: SchemaNode, path: KeyPath, message: str) -> tuple[str, str]:
    """Return how a message continues its path; some repeat their key, or one below.

    The rules of a section know its keys and not where the section lies, so they begin
    with `lr must ...`, `kwargs.lr must ...` or `optimizer.kwargs.lr must ...`.
    """
    named = _KEY.match(message)
    if not path or named is None:
        return " ", message
    own, _, below = named.group().partition(".")
    place = root.find(path)
    keys = place.fields() if isinstance(place, SchemaNode) else {}
    if own in keys:
        return ".", message
    if own == path[-1]:
        rest = message.removeprefix(own)
        return (".", rest[1:]) if below else (" ", rest.lstrip())
    return (": " if keys and own not in _PREDICATES else " "), message


def _path_in_data(root: SchemaNode, details: ErrorDetails, data: Any) -> KeyPath:
    """Return the error's place without pydantic's names of union members."""
    path: list[str] = []
    node = root
    for key in details["loc"]:
        name = str(key)
        if isinstance(data, Mapping) and (key in data or name in data):
            data = data[key] if key in data else data[name]
        elif isinstance(data, BaseModel) and name in type(data).model_fields:
            data = getattr(data, name)
        elif isinstance(key, int) and _has_index(data, key):
            data = data[key]
        elif name in node.fields():
            data = None
        else:
            continue
        path.append(name)
        node = node.child(name) or SchemaNode(())
    return tuple(path)


def _has_index(data: Any, index: int) -> bool:
    return (
        isinstance(data, Sequence) and not isinstance(data, str) and index < len(data)
    )


def _message(details: ErrorDetails) -> str:
    kind, value = details["type"], details["input"]
    if kind == "missing":
        return "is required, but not set"
    if kind == "extra_forbidden":
        return "is not a known key"
    context = details.get("ctx", {})
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", details["msg"]))
    if kind in ("literal_error", "enum"):
        hint = did_you_mean(value, _choices(context)) if isinstance(value, str) else ""
        return f"must be {context.get('expected')}: got {show(value)}{hint}"
    expected = _EXPECTED.get(kind)
    if expected is None:
        text = details["msg"]
        expected = text[:1].lower() + text[1:]
        for words, plain in _PLAIN.items():
            expected = expected.replace(words, plain)
    quotes = "; put it in quotes" if _is_unquoted(kind, value) else ""
    return f"{expected}: got {show(value)}{quotes}"


def _is_unquoted(kind: str, value: Any) -> bool:
    """Whether a text such as the version 2.0 was read as something else."""
    return kind == "string_type" and isinstance(value, bool | int | float)


def _choices(context: Mapping[str, Any]) -> list[str]:
    expected = str(context.get("expected", ""))
    return [part for part in expected.split("'")[1::2] if part]
