"""What an answer may be, once read: an expression of sympy, or one of these."""

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
    """A text is no mathematical answer as a whole; says where reading ended."""


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words, folded to lower case."""

    text: str


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number or expression with a unit; `%` is one."""

    value: Value
    unit: str


@dataclass(frozen=True, slots=True)
class Group:
    """Several values: a point, a set, an interval, a ratio, or just several answers."""

    bracket: Bracket
    """How it is written; "" without brackets, `[)` is open on the right."""
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
    """One fewer than sides: `=`, `!=`, `<`, `<=`, `>`, `>=` or `in`."""
    sides: tuple[Value, ...]
