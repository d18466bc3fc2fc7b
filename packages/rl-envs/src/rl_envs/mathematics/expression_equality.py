"""Equality of two expressions as functions of their variables.

Expressions are evaluated at a few points with many digits. Different expressions do not
agree there, and this avoids symbolic simplification, which may take forever.
"""

from __future__ import annotations

from typing import Any

import sympy

__all__ = ["are_proportional", "are_same_expressions"]

_DIGITS = 40
_TOLERANCE = sympy.Float("1e-25", _DIGITS)
# Below this, a sum of cancelling terms counts as zero.
_ZERO = sympy.Float("1e-30", _DIGITS)
_MIN_SIGNIFICANT_DIGITS = 6
_MIN_DECIMALS = 6
_NUM_POINTS = 6
# One point may be a coincidence, and some points are outside of a domain.
_MIN_POINTS = 2
# Positive and negative fractions of primes, at which no identity holds by accident.
_SEEDS = ((37, 23), (-71, 43), (113, 61), (-29, 31), (17, 59), (-149, 47), (83, 37))


def are_same_expressions(gold: Any, answer: Any) -> bool:
    """Compare two expressions of sympy.

    A decimal number also equals an exact number that rounds to it, provided that it has
    at least six significant digits.
    """
    if gold == answer:
        return True
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    if gold.is_Rational and answer.is_Rational:
        return _is_rounded(gold, answer) or _is_rounded(answer, gold)
    if not gold.free_symbols | answer.free_symbols:
        return _are_same_constants(gold, answer)
    ratios = _at_points(gold, answer)
    return len(ratios) >= _MIN_POINTS and all(_is_same(*pair) for pair in ratios)


def are_proportional(gold: Any, answer: Any, *, positive: bool) -> bool:
    """Return True if one expression is a nonzero constant times the other."""
    if gold.free_symbols != answer.free_symbols:
        return False
    pairs = _at_points(gold, answer)
    if len(pairs) < _MIN_POINTS or any(abs(b) < _ZERO for _, b in pairs):
        return False
    ratios = [sympy.N(a / b, _DIGITS) for a, b in pairs]
    if abs(ratios[0]) < _ZERO or (positive and not ratios[0].is_positive):
        return False
    return all(_is_same(ratio, ratios[0]) for ratio in ratios)


def _are_same_constants(gold: Any, answer: Any) -> bool:
    a, b = _number(gold), _number(answer)
    if not (_is_finite(a) and _is_finite(b)):
        return False
    if _is_same(a, b):
        return True
    return any(
        decimal.is_Rational and value.is_Float and _is_rounded(value, decimal)
        for decimal, value in ((gold, b), (answer, a))
    )


def _is_rounded(exact: Any, decimal: Any) -> bool:
    """Return True if a decimal number is the exact one, rounded to its digits."""
    num_decimals = _num_decimals(decimal)
    if not num_decimals:
        return False
    first_digits = abs(decimal.p) * 10**num_decimals // decimal.q
    # 0.3 is not an acceptable rounding of 1/3.
    if first_digits < 10 ** (_MIN_SIGNIFICANT_DIGITS - 1):
        return False
    if exact.is_Rational:
        # Two decimals differ on purpose, unless one just has more digits.
        others = _num_decimals(exact)
        if others is not None and not _MIN_DECIMALS <= num_decimals < others:
            return False
    half = sympy.Rational(1, 2 * 10**num_decimals)
    return bool(abs(exact - decimal) <= half)


def _num_decimals(number: Any) -> int | None:
    """Return the number of decimal places; None if they never end."""
    rest, twos, fives = int(number.q), 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None


def _at_points(gold: Any, answer: Any) -> list[tuple[Any, Any]]:
    """Return both values at points where both are defined."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    pairs = []
    for point in range(_NUM_POINTS):
        values = {}
        for place, symbol in enumerate(symbols):
            top, bottom = _SEEDS[(point + place) % len(_SEEDS)]
            values[symbol] = sympy.Rational(top + 7 * place, bottom + 2 * point)
        a, b = (_number(expression.subs(values)) for expression in (gold, answer))
        if _is_finite(a) and _is_finite(b):
            pairs.append((a, b))
        # Their domains differ: log(x^2) is not 2 log(x).
        elif _is_finite(a) != _is_finite(b):
            return []
    return pairs


def _number(expression: Any) -> Any:
    """Evaluate an expression without variables."""
    value = sympy.N(expression, _DIGITS)
    # Terms that cancel leave noise, without a digit that means something, in place of
    # zero; its size says nothing, as a number may also be tiny.
    if value.is_Float and value._prec == 1:
        return sympy.Integer(0)
    return value


def _is_finite(value: Any) -> bool:
    return bool(value.is_number and value.is_finite)


def _is_same(a: Any, b: Any) -> bool:
    # Relative, so that tiny and huge values are compared alike.
    size = max(abs(a), abs(b))
    return bool(size == 0 or abs(a - b) <= _TOLERANCE * size)
