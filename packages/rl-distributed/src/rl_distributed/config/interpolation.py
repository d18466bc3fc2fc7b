"""Replace `${a.b}` by the value of another key, and compute with a few functions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rl_distributed.config.origins import (
    ConfigDocument,
    KeyPath,
    check_depth,
    dotted,
    plain_copy,
)
from rl_distributed.config.schema import MISSING, SchemaNode
from rl_distributed.config.yaml_file import parse_scalar
from rl_distributed.errors import ConfigError
from rl_distributed.suggestion import did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["FUNCTIONS", "interpolate"]

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda *numbers: sum(numbers),
    "mul": lambda *numbers: _product(numbers),
    "div": lambda dividend, divisor: dividend / divisor,
    "max": lambda *numbers: max(numbers),
    "min": lambda *numbers: min(numbers),
}
"""Functions of `${name:argument,...}`."""

# Bounds on what a few lines can become; none of them is near what anybody writes.
_MOST_LEVELS = 50
_MOST_COPIED = 100_000
_LONGEST_TEXT = 1_000_000
_MOST_BITS = 1_024
_FUNCTION = re.compile(r"([A-Za-z_][\w.]*):(.*)", re.DOTALL)
_DOT = re.compile(r"(?<!\\)\.")


def interpolate(
    data: Mapping[str, Any], schema: type[BaseModel] | None = None
) -> ConfigDocument:
    r"""Return a copy of `data` with every `${...}` resolved.

    `${a.b}` is the value at `a.b`, with its type where it is the whole string;
    `${.b}` is a neighbour in the same section, each further dot goes one section up.
    `${mul:${a},2}` computes (see `FUNCTIONS`), `\${` is a literal `${`. A key that is
    not in the data takes its default from `schema`, if there is one.

    Raises:
        ConfigError: A key does not exist, keys refer to each other in a circle or over
            too many keys, a section is put into the middle of a string, or the result
            is too large.
    """
    check_depth(data, "the configuration")
    document = ConfigDocument(data)
    resolver = _Resolver(document, SchemaNode.of(schema) if schema else None)
    return ConfigDocument(resolver.value((), document), document.origins)


class _Resolver:
    """Resolves one document; remembers what it has resolved."""

    def __init__(self, document: ConfigDocument, schema: SchemaNode | None) -> None:
        self._document = document
        self._schema = schema
        self._active: list[KeyPath] = []
        self._done: dict[KeyPath, Any] = {}
        self._level = 0
        self._num_copied = 0

    def value(self, path: KeyPath, raw: Any) -> Any:
        """`raw`, which stands at `path`, with all its content resolved."""
        if isinstance(raw, Mapping):
            return {
                key: self.value((*path, str(key)), item) for key, item in raw.items()
            }
        if isinstance(raw, list | tuple):
            return [
                self.value((*path, str(index)), item) for index, item in enumerate(raw)
            ]
        if isinstance(raw, str) and "${" in raw:
            return self._string(path, raw)
        return plain_copy(raw)

    def _string(self, path: KeyPath, raw: str) -> Any:
        # Resolved only once; copied, because two places must not share a list.
        if path in self._done:
            return plain_copy(self._done[path])
        if path in self._active:
            circle = [*self._active[self._active.index(path) :], path]
            self._fail(path, f"refers to itself: {' -> '.join(map(dotted, circle))}")
        self._active.append(path)
        try:
            result = self._text(path, raw)
        finally:
            self._active.pop()
        self._done[path] = result
        return result

    def _text(self, path: KeyPath, raw: str) -> Any:
        self._level += 1
        if self._level > _MOST_LEVELS:
            self._fail(path, f"refers over more than {_MOST_LEVELS} steps")
        try:
            return self._resolved_text(path, raw)
        finally:
            self._level -= 1

    def _resolved_text(self, path: KeyPath, raw: str) -> Any:
        parts: list[Any] = []
        position = 0
        while position < len(raw):
            start = raw.find("${", position)
            if start < 0:
                parts.append(raw[position:])
                break
            # Escaped: a literal `${`.
            if start > position and raw[start - 1] == "\\":
                parts.append(raw[position : start - 1] + "${")
                position = start + 2
                continue
            if start > position:
                parts.append(raw[position:start])
            end = self._closing(path, raw, start + 2)
            parts.append(self._expression(path, raw[start + 2 : end]))
            # The whole string is one reference, so the value keeps its type.
            if start == 0 and end == len(raw) - 1:
                return parts[0]
            position = end + 1
        texts = [self._as_text(path, part) for part in parts]
        if sum(map(len, texts)) > _LONGEST_TEXT:
            self._fail(path, f"becomes more than {_LONGEST_TEXT:,} characters")
        return "".join(texts)

    def _closing(self, path: KeyPath, raw: str, start: int) -> int:
        depth = 1
        for position in range(start, len(raw)):
            if raw[position] == "{":
                depth += 1
            elif raw[position] == "}":
                depth -= 1
                if depth == 0:
                    return position
        self._fail(path, f"has a '${{' without its '}}': {raw!r}")

    def _as_text(self, path: KeyPath, part: Any) -> str:
        if isinstance(part, str):
            return part
        if isinstance(part, dict | list):
            self._fail(path, "puts a section or a list into the middle of a string")
        # Spelled as in YAML rather than Python.
        if part is None or isinstance(part, bool):
            return str(part).lower().replace("none", "null")
        return str(part)

    def _expression(self, path: KeyPath, body: str) -> Any:
        call = _FUNCTION.fullmatch(body.strip())
        if call is None:
            return self._reference(path, body.strip())
        name, text = call.groups()
        function = FUNCTIONS.get(name)
        if function is None:
            self._fail(
                path,
                f"uses an unknown function {name!r} in '${{{body}}}'"
                f"{did_you_mean(name, FUNCTIONS)}; known: {', '.join(FUNCTIONS)}",
            )
        arguments = [self._argument(path, item.strip()) for item in _split(text)]
        try:
            result = function(*arguments)
            # Nested products could otherwise grow without bound.
            if isinstance(result, int) and result.bit_length() > _MOST_BITS:
                raise OverflowError(f"the result has more than {_MOST_BITS} bits")
            return result
        except (TypeError, ValueError, ArithmeticError) as error:
            self._fail(path, f"cannot compute '${{{body}}}': {error}")

    def _argument(self, path: KeyPath, text: str) -> Any:
        value = self._text(path, text)
        return parse_scalar(value) if isinstance(value, str) else value

    def _reference(self, path: KeyPath, body: str) -> Any:
        target = self._target(path, body)
        node: Any = self._document
        for depth, key in enumerate(target):
            found = _step(node, key)
            if found is MISSING and isinstance(node, str) and "${" in node:
                # The enclosing section may itself be a reference.
                found = _step(self.value(target[:depth], node), key)
            if found is MISSING:
                return self._default(path, target, node)
            node = found
        # The target encloses this reference, so it would contain itself.
        if any(target == active[: len(target)] for active in self._active):
            circle = [*self._active, target]
            self._fail(path, f"refers to itself: {' -> '.join(map(dotted, circle))}")
        found = self.value(target, node)
        # Counted over the whole document, as a few nested references can
        # become gigabytes.
        self._num_copied += _num_values(found)
        if self._num_copied > _MOST_COPIED:
            self._fail(
                path,
                f"refers to '{dotted(target)}', and with it all references together "
                f"copy more than {_MOST_COPIED:,} values",
            )
        return found

    def _target(self, path: KeyPath, body: str) -> KeyPath:
        ups = len(body) - len(body.lstrip("."))
        keys = tuple(
            part.replace("\\.", ".") for part in _DOT.split(body[ups:]) if part
        )
        if not keys or ups > len(path):
            self._fail(path, f"refers to no key: '${{{body}}}'")
        return (*path[: len(path) - ups], *keys) if ups else keys

    def _default(self, path: KeyPath, target: KeyPath, section: Any) -> Any:
        if self._schema is not None:
            default = self._schema.default(target)
            if default is not MISSING:
                return plain_copy(default)
        known = section if isinstance(section, Mapping) else {}
        hint = did_you_mean(target[-1], map(str, known))
        self._fail(path, f"refers to '{dotted(target)}', which is not set{hint}")

    def _fail(self, path: KeyPath, text: str) -> NoReturn:
        origin = self._document.origin(path)
        suffix = f" ({origin})" if origin else ""
        raise ConfigError(f"{dotted(path)} {text}{suffix}")


def _num_values(value: Any) -> int:
    if isinstance(value, Mapping):
        return 1 + sum(map(_num_values, value.values()))
    return 1 + sum(map(_num_values, value)) if isinstance(value, list) else 1


def _step(node: Any, key: str) -> Any:
    if isinstance(node, Mapping):
        if key in node:
            return node[key]
        # YAML keys may be numbers.
        return next((item for name, item in node.items() if str(name) == key), MISSING)
    if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        return node[int(key)]
    return MISSING


def _product(numbers: Sequence[Any]) -> Any:
    # Python takes a text or a list times a number for so many copies of it.
    wrong = [number for number in numbers if not isinstance(number, int | float)]
    if wrong and len(numbers) > 1:
        raise TypeError(f"{wrong[0]!r:.80} is no number")
    return math.prod(numbers)


def _split(text: str) -> list[str]:
    """Arguments at the commas that lie outside of `${...}`."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
