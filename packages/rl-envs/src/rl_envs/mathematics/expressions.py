"""Parsing of sums, products and powers from tokens to sympy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from rl_envs.mathematics.factors import BARS, FRACTIONS, FactorReader
from rl_envs.mathematics.names import ACCENTS, CONSTANTS, FUNCTIONS, GREEK
from rl_envs.mathematics.tokens import Token
from rl_envs.mathematics.values import Group, Unreadable, Value

__all__ = ["ExpressionReader"]

_TIMES = ("*", r"\cdot", r"\times", r"\ast")
_OVER = ("/", r"\div")


class ExpressionReader(FactorReader):
    """Reads sums.

    `double_sign` is the current meaning of `\\pm`, 1 or -1; `num_double_signs` counts
    such signs.
    """

    def __init__(self, tokens: Sequence[Token], *, python: bool) -> None:
        super().__init__(tokens, python=python)
        self.double_sign, self.num_double_signs = 1, 0

    # Sums and products ----------------------------------------------------------

    def sum(self) -> Value:
        """Read terms with signs between them."""
        value = self._term()
        while True:
            if self.accept("+"):
                value = self.scalar(value) + self.scalar(self._term())
            elif self.accept("-"):
                value = self.scalar(value) - self.scalar(self._term())
            elif (sign := self._double_sign()) is not None:
                value = self.scalar(value) + sign * self.scalar(self._term())
            else:
                return value

    def _double_sign(self) -> int | None:
        if not self.accept(r"\pm", r"\mp"):
            return None
        self.num_double_signs += 1
        # `a \pm b \mp c` takes the upper signs together, and then the lower ones.
        upper = self.before().text == r"\pm"
        return self.double_sign if upper else -self.double_sign

    def _term(self) -> Value:
        value = self._signed()
        while True:
            if self.accept(*_TIMES):
                value = self.scalar(value) * self.scalar(self._signed())
            elif self.accept(*_OVER):
                value = self.divided(value, self._signed())
            elif not isinstance(value, Group) and self._starts_factor():
                value = self.side_by_side(value)
            else:
                return value

    def _signed(self) -> Value:
        if self.accept("-"):
            return -self.scalar(self._signed())
        if self.accept("+"):
            return self.scalar(self._signed())
        sign = self._double_sign()
        if sign is not None:
            return sign * self.scalar(self._signed())
        # Before the sign and the product apply: -1 1/2 is -(1 + 1/2).
        return self.mixed()

    def mixed(self) -> Value:
        """Read a factor with its powers, or a mixed number."""
        start = self.place
        value = self.power()
        # Only a number alone has a fraction after it: not the end of 2^1 or x_2.
        if self.place != start + 1 or not isinstance(value, sympy.Integer):
            return value
        if self.before().kind != "number":
            return value
        if self.peek().kind == "number":
            # `1 2/3` is a mixed number; any other pair of numbers is an error.
            top, over, bottom = (self.peek(ahead) for ahead in range(3))
            if over.text != "/" or not (top.text.isdigit() and bottom.text.isdigit()):
                raise Unreadable("two numbers stand side by side")
            self.place += 3
            fraction = self.divided(*map(sympy.Integer, (top.text, bottom.text)))
            return _mixed(value, fraction)
        if self.peek().text in FRACTIONS:
            factor = self.scalar(self.power())
            return _mixed(value, factor) if factor.is_Rational else value * factor
        return value

    def _starts_factor(self) -> bool:
        token = self.peek()
        if token.kind == "words":
            return False
        if token.kind == "sign":
            # A bar opens only outside of bars: inside, it closes them.
            return token.text in ("(", "{") or (token.text == "|" and not self.bars)
        if token.kind == "command":
            name = token.text[1:]
            return (
                name in GREEK
                or name in FUNCTIONS
                or name in CONSTANTS
                or name in ACCENTS
                or token.text in FRACTIONS
                or (token.text in BARS and token.text not in self.bars)
            )
        return token.kind in ("number", "letter", "name", "begin")

    def side_by_side(self, value: Value) -> Any:
        """Multiply adjacent factors."""
        if self.peek().kind == "number":
            raise Unreadable("two numbers stand side by side")
        return self.scalar(value) * self.scalar(self.power())

    # Powers ----------------------------------------------------------------------

    def power(self) -> Value:
        """Read a factor with its powers and factorials."""
        value = self.primary()
        while True:
            if self.accept("!"):
                value = sympy.factorial(self.scalar(value))
            elif self.peek().text == "^" and not self.is_degree():
                self.take()
                value = self._raised(self.scalar(value), self.exponent())
            else:
                return value

    def _raised(self, base: Any, exponent: Any) -> Any:
        # sympy would return zoo, which compares in surprising ways.
        if base == 0 and exponent.is_negative:
            raise Unreadable("it divides by zero")
        return base**exponent

    def exponent(self) -> Any:
        """Read the exponent after `^`."""
        if self.peek().text == "{":
            return self.scalar(self._braced())
        if self.accept("-"):
            return -self.exponent()
        if self.accept("+"):
            return self.exponent()
        # Powers associate to the right: 2^3^2 is 2^9.
        return self.scalar(self.power())

    def is_degree(self) -> bool:
        """Return True if a degree sign is next."""
        if self.peek().text != "^":
            return self.peek().text == r"\degree"
        if self.peek(1).text in (r"\circ", r"\degree"):
            return True
        return self.peek(1).text == "{" and self.peek(2).text == r"\circ"

    def take_degree(self) -> None:
        """Consume a degree sign."""
        if self.take().text != "^":
            return
        if self.accept("{"):
            self.take()
            self.expect("}")
        else:
            self.take()


def _mixed(whole: Any, fraction: Any) -> Any:
    # `2 \frac{3}{2}` cannot be a mixed number, so it is a product.
    return whole + fraction if 0 < fraction < 1 else whole * fraction
