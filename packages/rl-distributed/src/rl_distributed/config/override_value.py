"""The value grammar of overrides: scalars, quotes, `[lists]` and `{mappings}`."""

from __future__ import annotations

from typing import Any

from rl_distributed.config.yaml_file import parse_scalar
from rl_distributed.errors import ConfigError

__all__ = ["parse_value"]

_QUOTES = "'\""
_ESCAPABLE = ",[]{}:'\" \\"
_CLOSERS = {"[": "]", "{": "}"}
# The reader is recursive and must stop before Python's own limit.
_MAX_DEPTH = 50


def parse_value(text: str) -> Any:
    """Return the value that `text`, the part after `=`, stands for.

    An empty text is the empty string. A comma outside of brackets and quotes is an
    error, because it could mean a list or be part of a string.
    """
    reader = _Reader(text)
    reader.skip_spaces()
    if reader.at_end:
        return ""
    value = reader.value(",", 0)
    reader.skip_spaces()
    if not reader.at_end:
        raise ConfigError(
            f"unexpected {reader.peek!r} at position {reader.position + 1} of the "
            f"value; write a list as [a,b], or quote a string: '\"{text.strip()}\"'"
        )
    return value


class _Reader:
    """A recursive-descent reader over one value."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    @property
    def at_end(self) -> bool:
        return self.position >= len(self.text)

    @property
    def peek(self) -> str:
        return self.text[self.position] if not self.at_end else ""

    def skip_spaces(self) -> None:
        while self.peek.isspace():
            self.position += 1

    def value(self, stops: str, depth: int) -> Any:
        """Return the next value; an unquoted one ends before a character of `stops`."""
        if depth > _MAX_DEPTH:
            raise ConfigError(f"brackets are nested more than {_MAX_DEPTH} deep")
        self.skip_spaces()
        if self.peek == "[":
            return self._list(depth + 1)
        if self.peek == "{":
            return self._mapping(depth + 1)
        if self.peek and self.peek in _QUOTES:
            return self._quoted()
        return self._unquoted(stops)

    def _list(self, depth: int) -> list[Any]:
        items: list[Any] = []
        self._open("[")
        while not self._closed("[", bool(items)):
            items.append(self.value(",]", depth))
        return items

    def _mapping(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        self._open("{")
        while not self._closed("{", bool(items)):
            self.skip_spaces()
            start = self.position
            key = self._quoted() if self.peek in _QUOTES else self._key()
            # One of the two would be lost silently.
            if key in items:
                raise ConfigError(f"key {key!r} is written twice")
            self.skip_spaces()
            if self.peek != ":" or self.position == start:
                raise ConfigError(f"a mapping is written {{key:value}}: {self.text!r}")
            self.position += 1
            items[key] = self.value(",}", depth)
        return items

    def _open(self, bracket: str) -> None:
        if self.peek != bracket:
            raise ConfigError(f"expected {bracket!r} in {self.text!r}")
        self.position += 1

    def _closed(self, opener: str, after_item: bool) -> bool:
        """Whether the bracket closes here; else steps over the comma before an item."""
        closer = _CLOSERS[opener]
        self.skip_spaces()
        if self.at_end:
            raise ConfigError(f"a {opener!r} has no {closer!r}: {self.text!r}")
        if self.peek == closer:
            self.position += 1
            return True
        if after_item:
            if self.peek != ",":
                raise ConfigError(
                    f"expected ',' or {closer!r} at position {self.position + 1} "
                    f"of {self.text!r}"
                )
            self.position += 1
            self.skip_spaces()
            if self.peek == closer:  # a comma after the last item
                self.position += 1
                return True
        return False

    def _quoted(self) -> str:
        quote, start = self.peek, self.position
        self.position += 1
        characters: list[str] = []
        while not self.at_end:
            character = self.peek
            self.position += 1
            if character == quote:
                return "".join(characters)
            if character == "\\" and self.peek and self.peek in (quote, "\\"):
                character = self.peek
                self.position += 1
            characters.append(character)
        raise ConfigError(f"the quote at position {start + 1} is not closed")

    def _key(self) -> str:
        start = self.position
        while not self.at_end and self.peek not in ":,{}[]":
            self.position += 1
        return self.text[start : self.position].strip()

    def _unquoted(self, stops: str) -> Any:
        characters: list[str] = []
        escaped = False
        while not self.at_end and self.peek not in stops:
            if self.text.startswith("${", self.position):
                characters.append(self._interpolation())
                continue
            following = self.text[self.position + 1 : self.position + 2]
            if self.peek == "\\" and following and following in _ESCAPABLE:
                self.position += 1
                escaped = True
            characters.append(self.peek)
            self.position += 1
        text = "".join(characters).strip()
        if not text and not escaped:
            raise ConfigError(f"an item is empty; write '' or null: {self.text!r}")
        # An escape means that the text is to be taken literally.
        return text if escaped else parse_scalar(_lower_bool(text))

    def _interpolation(self) -> str:
        start, depth = self.position, 0
        while not self.at_end:
            depth += (self.peek == "{") - (self.peek == "}")
            self.position += 1
            if depth == 0 and self.text[self.position - 1] == "}":
                return self.text[start : self.position]
        raise ConfigError(f"a '${{' has no '}}': {self.text!r}")


def _lower_bool(text: str) -> str:
    lowered = text.lower()
    return lowered if lowered in ("true", "false", "null") else text
