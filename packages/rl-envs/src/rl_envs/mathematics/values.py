"""Values of parsed answers, beside expressions and matrices of sympy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rl_envs.errors import EnvsError

__all__ = [
    "Group",
    "Quantity",
    "Relation",
    "SetOperation",
    "Unreadable",
    "Value",
    "Words",
]

Value: TypeAlias = Any
"""An expression or matrix of sympy, or one of the classes below."""
Bracket: TypeAlias = Literal["", "()", "[]", "(]", "[)", "{}", ":"]


class Unreadable(EnvsError, ValueError):
    """A text cannot be read as a mathematical answer; the message says where."""


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words, folded to lower case."""

    text: str


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number or expression with a unit, which may be `%`."""

    value: Value
    unit: str


@dataclass(frozen=True, slots=True)
class Group:
    """Several values: a point, a set, an interval, a ratio, or just several answers."""

    bracket: Bracket
    """Brackets of the group; "": none, `[)`: open on the right."""
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class SetOperation:
    """`union`, `intersection` or `difference` of sets."""

    name: str
    parts: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain such as `a = b` or `1 < x <= 2`."""

    signs: tuple[str, ...]
    """Signs between the sides: `=`, `!=`, `<`, `<=`, `>`, `>=` or `in`."""
    sides: tuple[Value, ...]
