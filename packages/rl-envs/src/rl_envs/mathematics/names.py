"""Known names: functions, constants, letters, units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

__all__ = [
    "ACCENTS",
    "CONSTANTS",
    "FUNCTIONS",
    "GREEK",
    "NUMBER_SETS",
    "SCALES",
    "SHORT_WORDS",
    "SYMPY_NAMES",
    "unit_name",
]

GREEK = frozenset(
    [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "varepsilon",
        "zeta",
        "eta",
        "theta",
        "vartheta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "sigma",
        "tau",
        "upsilon",
        "phi",
        "varphi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Xi",
        "Pi",
        "Sigma",
        "Upsilon",
        "Phi",
        "Psi",
        "Omega",
        "ell",
        "hbar",
    ]
)
CONSTANTS: dict[str, Any] = {
    "pi": sympy.pi,
    "infty": sympy.oo,
    "infinity": sympy.oo,
    "inf": sympy.oo,
    "oo": sympy.oo,
    "imath": sympy.I,
}


_ONE, _TWO = sympy.Integer(1), sympy.Integer(2)


def _log(value: Any, base: Any = None) -> Any:
    return sympy.log(value) if base is None else sympy.log(value, base)


def _root(value: Any, degree: Any = _TWO) -> Any:
    if degree.is_Integer and degree.is_odd and value.is_negative:
        # The real root, as taught in school; sympy returns the principal, complex one.
        return -sympy.root(-value, degree)
    return sympy.root(value, degree)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "cot": sympy.cot,
    "sec": sympy.sec,
    "csc": sympy.csc,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "asin": sympy.asin,
    "acos": sympy.acos,
    "atan": sympy.atan,
    "sinh": sympy.sinh,
    "cosh": sympy.cosh,
    "tanh": sympy.tanh,
    "exp": sympy.exp,
    "ln": sympy.log,
    "log": _log,
    "lg": lambda value: sympy.log(value, 10),
    "sqrt": _root,
    "cbrt": lambda value: _root(value, sympy.Integer(3)),
    "root": _root,
    "abs": sympy.Abs,
    "Abs": sympy.Abs,
    "floor": sympy.floor,
    "ceil": sympy.ceiling,
    "ceiling": sympy.ceiling,
    "factorial": sympy.factorial,
    "binomial": sympy.binomial,
    "binom": sympy.binomial,
    "gcd": sympy.gcd,
    "lcm": sympy.lcm,
    "max": sympy.Max,
    "min": sympy.Min,
    "Rational": lambda top, bottom=_ONE: top / bottom,
    "Integer": lambda value: value,
    "Float": lambda value: value,
    "frac": lambda top, bottom: top / bottom,
    "Pow": lambda base, power: base**power,
    "Re": sympy.re,
    "Im": sympy.im,
}
# Marks over or before letters that form a separate name.
ACCENTS = frozenset(
    [
        "overline",
        "bar",
        "vec",
        "hat",
        "tilde",
        "overrightarrow",
        "widehat",
        "dot",
        "mathcal",
        "mathscr",
        "angle",
        "triangle",
        "overset",
    ]
)
# Classes of sympy that occur in printed answers.
SYMPY_NAMES = frozenset(
    [
        "Eq",
        "Ne",
        "Lt",
        "Le",
        "Gt",
        "Ge",
        "And",
        "Or",
        "Union",
        "Intersection",
        "Complement",
        "Matrix",
        "Interval",
        "FiniteSet",
        "Tuple",
    ]
)
NUMBER_SETS = {
    "R": sympy.Reals,
    "N": sympy.Naturals,
    "Z": sympy.Integers,
    "Q": sympy.Rationals,
    "C": sympy.Complexes,
}
SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_UNITS = {
    "%": "% percent pct percentage",
    "degree": "degree degrees deg °",
    "dollar": "dollar dollars usd bucks $",
    "euro": "euro euros eur €",
    "pound sterling": "gbp £",
    "cent": "cent cents ¢",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "inch": "inch inches in",
    "foot": "foot feet ft",
    "yard": "yard yards yd yds",
    "mile": "mile miles mi",
    "g": "g gram grams gm",
    "mg": "mg milligram milligrams",
    "kg": "kg kilogram kilograms kgs",
    "ounce": "ounce ounces oz",
    "pound": "pound pounds lb lbs",
    "ton": "ton tons tonne tonnes",
    "second": "second seconds sec secs s",
    "minute": "minute minutes min mins",
    "hour": "hour hours hr hrs h",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "liter": "liter liters litre litres l",
    "ml": "ml milliliter milliliters millilitre millilitres",
    "gallon": "gallon gallons gal",
    "unit": "unit units",
    "square": "square squared sq",
    "cubic": "cubic cubed cu",
    "radian": "radian radians rad",
    "man": "man men",
    "woman": "woman women",
    "person": "person people persons",
    "child": "child children",
    "joule": "joule joules J",
    "newton": "newton newtons N",
    "watt": "watt watts W",
    "volt": "volt volts V",
    "hertz": "hertz Hz hz",
    "kelvin": "kelvin K",
    "mole": "mole moles mol",
    "mile per hour": "mph",
    "km per hour": "kmph kph",
    "per": "per / a",
}
_UNIT_OF = {word: unit for unit, words in _UNITS.items() for word in words.split()}
# Short words that must not be read as products of variables, such as c a t.
SHORT_WORDS = frozenset(word for word in _UNIT_OF if word.isalpha() and len(word) > 1)
SHORT_WORDS |= frozenset(
    [
        "and",
        "or",
        "the",
        "is",
        "are",
        "per",
        "yes",
        "no",
        "not",
        "way",
        "ways",
        "dog",
        "dogs",
        "cat",
        "cats",
        "pie",
        "pies",
        "toy",
        "toys",
        "car",
        "cars",
        "egg",
        "eggs",
        "cup",
        "cups",
        "hen",
        "hens",
        "pen",
        "pens",
        "bag",
        "bags",
        "box",
        "bus",
        "if",
        "for",
        "with",
    ]
)


def unit_name(words: list[str]) -> str:
    """Return the canonical spelling of a unit."""
    plain = []
    for word in words:
        known = _UNIT_OF.get(word) or _UNIT_OF.get(word.lower())
        if known is None:
            known = word.lower()
            # A plural, so that "3 apples" and "1 apple" have one unit; not "gas" or
            # "class".
            if len(known) > 3 and known.endswith("s") and not known.endswith("ss"):
                known = known[:-1]
        plain.extend(known.split())
    return _as_power(plain)


def _as_power(words: list[str]) -> str:
    """Return `cm ^2` for "square cm", "cm squared" and "cm^2"."""
    parts: list[str] = []
    pending = ""
    for word in words:
        if word in ("square", "cubic"):
            power = "^2" if word == "square" else "^3"
            # "cm squared" follows its unit, "square cm" precedes it.
            if parts and parts[-1] != "per" and not parts[-1].startswith("^"):
                parts.append(power)
            else:
                pending = power
            continue
        parts.append(word)
        if pending:
            parts.append(pending)
            pending = ""
    return " ".join([*parts, pending]).strip()
