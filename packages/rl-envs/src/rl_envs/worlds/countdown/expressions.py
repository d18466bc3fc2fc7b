"""Arithmetic expressions, parsed without `eval` and evaluated exactly."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction

from rl_envs.errors import EnvsError

__all__ = ["OPERATORS", "ExpressionError", "read_expression"]

# A longer text is no answer, and deep nesting may crash Python's parser.
_MAX_CHARACTERS = 200
_ALLOWED = frozenset("0123456789+-*/() ")

OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


class ExpressionError(EnvsError, ValueError):
    """A text is not an arithmetic expression of whole numbers."""


def read_expression(text: str) -> tuple[Fraction, Counter[int]]:
    """Return the exact value of an expression and the numbers that it uses.

    Args:
        text: Whole numbers, `+ - * /` and brackets; typographic signs such as
            \u00d7 and \u00f7 are accepted, too.

    Raises:
        ExpressionError: It is something else, or divides by zero.
    """
    plain = text.translate(_SIGNS).strip()
    if not plain or len(plain) > _MAX_CHARACTERS or not set(plain) <= _ALLOWED:
        raise ExpressionError("it must have whole numbers, + - * / and brackets only")
    try:
        tree = ast.parse(plain, mode="eval").body
        numbers: Counter[int] = Counter()
        return _value(tree, numbers), numbers
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"it cannot be read: {error}") from None
    except ZeroDivisionError:
        raise ExpressionError("it divides by zero") from None


_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u22c5": "*"})


def _value(node: ast.expr, numbers: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        return OPERATORS[type(node.op)](left, right)
    raise ExpressionError("it must have whole numbers, + - * / and brackets only")
