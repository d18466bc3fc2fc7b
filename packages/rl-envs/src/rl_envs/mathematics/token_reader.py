"""`TokenReader`: the place in the tokens, and what every part of reading needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import sympy

from rl_envs.mathematics.tokens import Token
from rl_envs.mathematics.values import Group, Unreadable, Value

__all__ = ["TokenReader"]


class TokenReader(ABC):
    """Takes tokens one by one; the levels of the grammar build on one another.

    Args:
        tokens: Of the whole answer; the last is `end`.
        python: `E` and `I` are constants, as sympy prints them.
    """

    def __init__(self, tokens: Sequence[Token], *, python: bool) -> None:
        self._tokens, self.python = tokens, python
        self.place = 0
        self.bars: list[str] = []

    @abstractmethod
    def several(self, *ends: str) -> Value:
        """Read one or more values up to one of the signs."""

    @abstractmethod
    def items(self, *ends: str) -> list[Value]:
        """Read values up to one of the signs."""

    @abstractmethod
    def sum(self) -> Value:
        """Read terms with signs between them."""

    @abstractmethod
    def power(self) -> Value:
        """Read a factor with its powers."""

    @abstractmethod
    def exponent(self) -> Any:
        """Read what follows `^`."""

    @abstractmethod
    def side_by_side(self, value: Value) -> Any:
        """Multiply a value with the factor after it."""

    # Tokens -------------------------------------------------------------------

    def peek(self, ahead: int = 0) -> Token:
        """Return a token without taking it."""
        return self._tokens[min(self.place + ahead, len(self._tokens) - 1)]

    def take(self) -> Token:
        """Return the next token and move past it."""
        token = self.peek()
        if token.kind == "end":
            raise Unreadable("it ends too early")
        self.place += 1
        return token

    def accept(self, *texts: str) -> bool:
        """Move past the next token if it is one of those."""
        if self.peek().kind == "end" or self.peek().text not in texts:
            return False
        self.place += 1
        return True

    def expect(self, *texts: str) -> str:
        """Move past a token that must be one of those."""
        token = self.peek()
        if not self.accept(*texts):
            got = repr(token.text) if token.text else "its end"
            raise Unreadable(f"{got} is where {' or '.join(texts)} must be")
        return token.text

    def expect_end(self) -> None:
        """Raise unless all has been read."""
        if self.peek().kind != "end":
            raise Unreadable(f"{self.peek().text!r} has no meaning at its place")

    def raw_group(self) -> str:
        """Return the text between braces, or that of one token."""
        if not self.accept("{"):
            return self.take().text
        depth, parts = 1, []
        while depth:
            token = self.take()
            depth += (token.text == "{") - (token.text == "}")
            parts.append(token.text)
        return "".join(parts[:-1])

    def scalar(self, value: Value) -> Any:
        """Return a value that can be calculated with."""
        if isinstance(value, Group) and len(value.items) == 1:
            return self.scalar(value.items[0])
        if isinstance(value, sympy.Expr | sympy.MatrixBase):
            return value
        raise Unreadable("it calculates with what is no number")

    def before(self) -> Token:
        """Return the token that was taken last."""
        return self._tokens[self.place - 1]

    def split_digit(self) -> Any:
        """Take the first digit of the number that is next."""
        text = self.peek().text
        rest = Token("number", text[1:])
        self._tokens = [
            *self._tokens[: self.place],
            rest,
            *self._tokens[self.place + 1 :],
        ]
        return sympy.Integer(text[0])
