"""Parsing of factors: numbers, variables, functions, brackets and matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from rl_envs.mathematics.names import (
    ACCENTS,
    CONSTANTS,
    FUNCTIONS,
    GREEK,
    NUMBER_SETS,
    SYMPY_NAMES,
)
from rl_envs.mathematics.token_reader import TokenReader
from rl_envs.mathematics.values import (
    Group,
    Quantity,
    Relation,
    SetOperation,
    Unreadable,
    Value,
)

__all__ = ["BARS", "FRACTIONS", "FactorReader"]

FRACTIONS = (r"\frac", r"\dfrac", r"\tfrac", r"\cfrac")
BARS = {
    "|": "|",
    r"\lvert": r"\rvert",
    r"\vert": r"\vert",
    r"\lfloor": r"\rfloor",
    r"\lceil": r"\rceil",
}
_OPENING = ("(", "[", "]", r"\{", r"\lbrace", r"\langle")
# `]1, 2[` is an open interval.
_CLOSING: dict[str, tuple[str, ...]] = {
    "(": (")", "]"),
    "[": (")", "]", "["),
    "]": ("]", "["),
    r"\{": (r"\}",),
    r"\lbrace": (r"\rbrace",),
    r"\langle": (r"\rangle",),
}
_RELATIONS = {"Eq": "=", "Ne": "!=", "Lt": "<", "Le": "<=", "Gt": ">", "Ge": ">="}
_SETS = {
    "Union": "union",
    "Intersection": "intersection",
    "Complement": "difference",
    "And": "",
    "Or": "",
}
_MATRICES = ("matrix", "pmatrix", "bmatrix", "vmatrix", "smallmatrix", "array")
_LINES = ("aligned", "align", "cases", "gathered")
_BRACKETS = {(False, False): "[]", (True, False): "(]", (False, True): "[)"}
# Above digits, as marks of a decimal that repeats them.
_REPEATED = (r"\overline", r"\bar", r"\dot")
_OF_ANGLES = ("sin", "cos", "tan", "cot", "sec", "csc")
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}


class FactorReader(TokenReader):
    """Reads one factor."""

    def primary(self) -> Value:
        """Read a factor without its powers."""
        token = self.peek()
        if token.kind == "number":
            return self._number()
        if token.kind == "letter":
            return self._letter()
        if token.kind in ("name", "command"):
            return self._named()
        if token.kind == "words" and self.is_call():
            return self._call()
        if token.kind == "begin":
            return self._environment()
        if token.text == "{":
            return self._braced()
        if token.text in _OPENING:
            return self._bracketed()
        if token.text in BARS:
            return self._between_bars()
        got = repr(token.text) if token.text else "its end"
        raise Unreadable(f"{got} is where a value must be")

    def _number(self) -> Any:
        text = self.take().text
        # Exact: a float would make 0.1 + 0.2 differ from 0.3.
        value = sympy.Rational(text)
        period = self._period(text)
        if not period:
            return value
        scale = 10 ** len(text.partition(".")[2]) * (10 ** len(period) - 1)
        return value + sympy.Rational(int(period), scale)

    def _period(self, text: str) -> str:
        """Consume the digits that a decimal repeats: `0.1\\overline{6}`, `0.(3)`."""
        marked = self.peek().text in _REPEATED and self.peek(1).text == "{"
        place, closing = (2, "}") if marked else (1, ")")
        # `0.5(3)` is a product, but nothing multiplies by a point without decimals.
        bracketed = self.peek().text == "(" and text.endswith(".")
        if "." not in text or not (marked or bracketed):
            return ""
        digits, end = self.peek(place).text, self.peek(place + 1).text
        if digits.isdigit() and end == closing and "e" not in text.lower():
            self.place += place + 2
            return digits
        if marked and text.endswith("."):
            raise Unreadable("it repeats something other than decimals")
        return ""

    def divided(self, top: Value, bottom: Value) -> Any:
        """Divide, refusing to divide by zero."""
        divisor = self.scalar(bottom)
        if divisor == 0:
            raise Unreadable("it divides by zero")
        return self.scalar(top) / divisor

    def _letter(self) -> Any:
        # With an index or prime, e and i are variables: e_1, i'.
        name = self.take().text
        if self.peek().text not in ("_", "'"):
            if name == "e" or (name == "E" and self.python):
                return sympy.E
            if name == "i" or (name == "I" and self.python):
                return sympy.I
        return self._symbol(name)

    def _symbol(self, name: str) -> Any:
        """Return a variable with its index and primes."""
        if self.accept("_"):
            name = f"{name}_{self.raw_group()}"
        # `x2`, as programs print it, is x_2.
        elif self.peek().kind == "number" and not self.peek().spaced:
            name = f"{name}_{self.take().text}"
        while self.accept("'"):
            name += "'"
        return sympy.Symbol(name)

    def _named(self) -> Value:
        """Read a function, a constant or a command."""
        token = self.peek()
        if token.text in BARS:
            return self._between_bars()
        if token.text in _OPENING:
            return self._bracketed()
        name = self.take().text.lstrip("\\")
        if token.kind == "command":
            value = self._command(token.text, name)
            if value is not None:
                return value
        if name == "sqrt":
            return self._square_root()
        if name in FUNCTIONS:
            return self._function(name)
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name in GREEK:
            return self._symbol(name.removeprefix("var"))
        raise Unreadable(f"{token.text} is not known")

    def _command(self, text: str, name: str) -> Value | None:
        """Read a command that only LaTeX has; return None for any other."""
        if text in FRACTIONS:
            return self.divided(self._argument(first=True), self._argument())
        if name in ("binom", "dbinom", "tbinom"):
            return sympy.binomial(self._argument(first=True), self._argument())
        if name in ("emptyset", "varnothing"):
            return Group("{}", ())
        if name == "mathbb":
            return NUMBER_SETS.get(self.raw_group())
        return self._accented(name) if name in ACCENTS else None

    def _accented(self, name: str) -> Any:
        if self.peek().text == "{":
            return self._symbol(f"{name} {self.raw_group()}")
        # `\angle ABC` and `\overline AB` name objects by a few letters.
        letters = ""
        # Four at most, as in a quadrilateral; further letters are variables again.
        while self.peek().kind in ("letter", "words") and len(letters) < len("ABCD"):
            letters += self.take().text
        if not letters:
            raise Unreadable(f"\\{name} has nothing after it")
        return sympy.Symbol(f"{name} {letters}")

    def _argument(self, *, first: bool = False) -> Any:
        """Read the argument of a command: a group, a digit or one factor."""
        token = self.peek()
        if token.text == "{":
            return self.scalar(self._braced())
        if token.kind == "number" and first and len(token.text) > 1:
            # In \frac12 each argument is one digit.
            return self.split_digit()
        return self.scalar(self.primary())

    def _square_root(self) -> Any:
        root = FUNCTIONS["root"]
        if self.peek().text == "[":
            self.take()
            degree = self.scalar(self.several("]"))
            self.expect("]")
            return root(self._argument(), degree)
        return root(self._argument())

    def _function(self, name: str) -> Any:
        # Twice, as `\log_2^3` may have both, in either order.
        base, power = None, None
        for _ in range(2):
            if self.accept("_"):
                base = self._argument()
            elif self.peek().text == "^":
                self.take()
                power = self.exponent()
        # sin^{-1} is the inverse, although sin^2 is a power.
        if power == -1 and name in _INVERSES:
            name, power = _INVERSES[name], None
        arguments = self._arguments(angle=name in _OF_ANGLES)
        if base is not None:
            if name != "log":
                raise Unreadable(f"{name} has no index")
            arguments.append(base)
        try:
            value = FUNCTIONS[name](*arguments)
        # A wrong number of arguments, or one outside the function's domain.
        except (TypeError, ValueError, sympy.PolynomialError) as error:
            raise Unreadable(f"{name} does not take its arguments") from error
        return value if power is None else value**power

    def _arguments(self, *, angle: bool) -> list[Any]:
        for opening, closing in (("(", ")"), ("{", "}")):
            if self.accept(opening):
                found = self.items(closing)
                self.expect(closing)
                return [self.scalar(_in_radians(item, angle)) for item in found]
        # The argument in `\sin 2x` extends over numbers and variables.
        value = self.scalar(self.mixed())
        while self.peek().kind in ("number", "letter") or self._is_letter_command():
            value = self.scalar(self.side_by_side(value))
        # Not left over as the unit of the function's value.
        if angle and self.is_degree():
            self.take_degree()
            value = _in_radians(Quantity(value, "degree"), angle)
        return [value]

    def _is_letter_command(self) -> bool:
        token = self.peek()
        name = token.text[1:]
        return token.kind == "command" and (name in GREEK or name in CONSTANTS)

    # Brackets --------------------------------------------------------------------

    def _braced(self) -> Value:
        self.expect("{")
        found = self.items("}")
        self.expect("}")
        return found[0] if len(found) == 1 else Group("{}", tuple(found))

    def _bracketed(self) -> Value:
        # Within brackets a bar opens again: |x (|y|)|.
        opening = self.take().text
        bars, self.bars = self.bars, []
        found = self.items(*_CLOSING[opening])
        closing = self.expect(*_CLOSING[opening])
        self.bars = bars
        if opening in (r"\{", r"\lbrace"):
            return Group("{}", tuple(found))
        if opening == "(" and closing == ")" and len(found) == 1:
            return found[0]
        if opening == "[" and closing == "]" and _are_rows(found):
            return _matrix([item.items for item in found])
        # Only intervals have different brackets, and two ends.
        kind = (opening in ("(", "]", r"\langle"), closing in (")", "[", r"\rangle"))
        if kind[0] != kind[1] and len(found) != 2:
            raise Unreadable("its brackets do not match")
        return Group(_BRACKETS.get(kind, "()"), tuple(found))  # type: ignore[arg-type]

    def _between_bars(self) -> Any:
        opening = self.take().text
        # Known while reading inside, where the same bar closes instead of opening.
        self.bars.append(opening)
        value = self.scalar(self.sum())
        self.bars.pop()
        self.expect(BARS[opening])
        if opening == r"\lfloor":
            return sympy.floor(value)
        if opening == r"\lceil":
            return sympy.ceiling(value)
        if isinstance(value, sympy.MatrixBase):
            return _determinant(value)
        return sympy.Abs(value)

    def _environment(self) -> Value:
        """Read a matrix or an aligned list of values."""
        name = self.take().text
        rows: list[list[Value]] = [[]]
        while self.peek().kind != "finish":
            if self.accept("¶"):
                rows.append([])
            elif not self.accept("&"):
                rows[-1].extend(self.items("&", "¶"))
            if self.peek().kind == "end":
                raise Unreadable(f"{name} has no end")
        if self.take().text != name or name not in _MATRICES + _LINES:
            raise Unreadable(f"{name} is not known, or ends as something else")
        rows = [row for row in rows if row]
        if name in _LINES:
            return Group("", tuple(item for row in rows for item in row))
        matrix = _matrix(rows)
        return _determinant(matrix) if name == "vmatrix" else matrix

    # Names of sympy ----------------------------------------------------------------

    def is_call(self) -> bool:
        """Return True if a sympy class with arguments is next."""
        token = self.peek()
        return token.text in SYMPY_NAMES and self.peek(1).text in ("(", ".")

    def _call(self) -> Value:
        name = self.take().text
        variant = self.take().text and self.take().text if self._has_dot() else ""
        self.expect("(")
        if name == "Interval":
            return self._interval(variant)
        found = self.items(")")
        self.expect(")")
        if name in _RELATIONS:
            if len(found) != 2:
                raise Unreadable(f"{name} takes two sides")
            return Relation((_RELATIONS[name],), tuple(found))
        if name == "Matrix":
            return _as_matrix(found)
        if name in ("FiniteSet", "Tuple"):
            return Group("{}" if name == "FiniteSet" else "()", tuple(found))
        if not _SETS[name]:
            return Group("", tuple(found))
        return SetOperation(_SETS[name], tuple(found))

    def _has_dot(self) -> bool:
        return self.peek().text == "."

    def _interval(self, variant: str) -> Value:
        ends = [self.sum()]
        self.expect(",")
        ends.append(self.sum())
        opened = [variant in ("open", "Lopen"), variant in ("open", "Ropen")]
        for place in range(2):
            if self.accept(","):
                opened[place] = self.take().text == "True"
        self.expect(")")
        # sympy omits the flags if an end is infinite.
        kind = (opened[0] or ends[0] == -sympy.oo, opened[1] or ends[1] == sympy.oo)
        return Group(_BRACKETS.get(kind, "()"), tuple(ends))  # type: ignore[arg-type]


def _in_radians(value: Value, angle: bool) -> Value:
    """Return the argument of a function of angles, which may be in degrees."""
    if not angle or not isinstance(value, Quantity) or value.unit != "degree":
        return value
    return value.value * sympy.pi / 180


def _are_rows(found: list[Value]) -> bool:
    return len(found) > 0 and all(
        isinstance(item, Group) and item.bracket == "[]" for item in found
    )


def _as_matrix(found: list[Value]) -> Any:
    if len(found) == 1 and isinstance(found[0], sympy.MatrixBase):
        return found[0]
    if len(found) == 1 and isinstance(found[0], Group):
        return _matrix([[item] for item in found[0].items])
    raise Unreadable("Matrix takes a list of rows")


def _matrix(rows: Sequence[Sequence[Value]]) -> Any:
    if len({len(row) for row in rows}) != 1:
        raise Unreadable("the rows of a matrix differ in length")
    if not all(isinstance(item, sympy.Expr) for row in rows for item in row):
        raise Unreadable("a matrix has an entry that is not a number")
    return sympy.ImmutableMatrix(rows)


def _determinant(matrix: Any) -> Any:
    if matrix.rows != matrix.cols:
        raise Unreadable("only a square matrix has a determinant")
    return matrix.det()
