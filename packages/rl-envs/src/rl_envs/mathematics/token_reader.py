"""`TokenReader`: the position in the tokens, and basic operations of parsing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import sympy

from rl_envs.mathematics.tokens import Token
from rl_envs.mathematics.values import Group, Unreadable, Value

__all__ = ["TokenReader"]


class TokenReader(ABC):
    """Consumes tokens one by one; base of the levels of the grammar.

    The levels are split over subclasses; the abstract methods are those of a looser
    level that a tighter one calls, as within brackets.

    Args:
        tokens: Tokens of the whole answer; the last is `end`.
        python: True if `E` and `I` are constants, as printed by sympy.
    """

    def __init__(self, tokens: Sequence[Token], *, python: bool) -> None:
        self._tokens, self.python = tokens, python
        self.place = 0
        # The bars that are open: a bar has the same sign at both of its ends.
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
    def mixed(self) -> Value:
        """Read a factor with its powers, or a mixed number."""

    @abstractmethod
    def is_degree(self) -> bool:
        """Return True if a degree sign is next."""

    @abstractmethod
    def take_degree(self) -> None:
        """Consume a degree sign."""

    @abstractmethod
    def exponent(self) -> Any:
        """Read the exponent after `^`."""

    @abstractmethod
    def side_by_side(self, value: Value) -> Any:
        """Multiply a value with the factor after it."""

    # Tokens -------------------------------------------------------------------

    def peek(self, ahead: int = 0) -> Token:
        """Return a token without consuming it."""
        # Never past `end`, so that callers need not check the length.
        return self._tokens[min(self.place + ahead, len(self._tokens) - 1)]

    def take(self) -> Token:
        """Consume the next token and return it."""
        token = self.peek()
        if token.kind == "end":
            raise Unreadable("it ends too early")
        self.place += 1
        return token

    def accept(self, *texts: str) -> bool:
        """Consume the next token if it is one of those."""
        if self.peek().kind == "end" or self.peek().text not in texts:
            return False
        self.place += 1
        return True

    def expect(self, *texts: str) -> str:
        """Consume the next token, which must be one of those."""
        token = self.peek()
        if not self.accept(*texts):
            got = repr(token.text) if token.text else "its end"
            raise Unreadable(f"{got} is where {' or '.join(texts)} must be")
        return token.text

    def expect_end(self) -> None:
        """Raise unless all tokens have been consumed."""
        if self.peek().kind != "end":
            raise Unreadable(f"{self.peek().text!r} is unexpected")

    def raw_group(self) -> str:
        """Consume a group in braces, or one token, and return its text."""
        if not self.accept("{"):
            return self.take().text
        depth, parts = 1, []
        while depth:
            token = self.take()
            depth += (token.text == "{") - (token.text == "}")
            parts.append(token.text)
        return "".join(parts[:-1])

    def scalar(self, value: Value) -> Any:
        """Return a value as a number, expression or matrix."""
        if isinstance(value, Group) and len(value.items) == 1:
            return self.scalar(value.items[0])
        if isinstance(value, sympy.Expr | sympy.MatrixBase):
            return value
        raise Unreadable("it calculates with something other than a number")

    def before(self) -> Token:
        """Return the token consumed last."""
        return self._tokens[self.place - 1]

    def split_digit(self) -> Any:
        """Consume only the first digit of the next number."""
        text = self.peek().text
        parts = [Token("number", text[0]), Token("number", text[1:])]
        # A new list, as the tokens are the caller's. Both parts stay in it, as a value
        # with a double sign is read twice.
        self._tokens = [
            *self._tokens[: self.place],
            *parts,
            *self._tokens[self.place + 1 :],
        ]
        return sympy.Integer(self.take().text)
