"""`is_same`: compares the meaning of an answer with that of the solution.

The solution decides how strict to be: without a unit in it, `5 cm` equals 5, and 5
suffices for `x = 5`. Brackets, the order of coordinates, units given by both, and names
on both sides must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from rl_envs.mathematics.expression_equality import (
    are_proportional,
    are_same_expressions,
)
from rl_envs.mathematics.values import (
    Bracket,
    Group,
    Quantity,
    Relation,
    SetOperation,
    Value,
    Words,
)

__all__ = ["is_same"]

_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
_NO_SOLUTIONS = frozenset(
    ["no solution", "no solutions", "none", "empty set", "no real solution"]
)
# Matching without order is quadratic, and each comparison may be slow.
_MAX_UNORDERED = 64
_UNIT_LETTERS = {"m": "m", "second": "s", "g": "g", "hour": "h", "liter": "l"}


def is_same(gold: Value, answer: Value) -> bool:
    """Compare the value of an answer with that of the solution."""
    gold, answer = _simple(gold), _simple(answer)
    for kind, compare in _COMPARISONS:
        if isinstance(gold, kind) or isinstance(answer, kind):
            return compare(gold, answer)
    if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return _is_same_matrix(gold, answer)
    return are_same_expressions(gold, answer)


def _simple(value: Value) -> Value:
    """Unwrap a single value, and normalize sets with several spellings."""
    while isinstance(value, Group) and len(value.items) == 1:
        [value] = value.items
    if isinstance(value, Words) and value.text in _NO_SOLUTIONS:
        return Group("{}", ())
    if value == Group("()", (-sympy.oo, sympy.oo)):
        return sympy.Reals
    return value


# Words and units ----------------------------------------------------------------------


def _is_same_words(gold: Value, answer: Value) -> bool:
    # "the winner = Alice" answers "Alice".
    if isinstance(answer, Relation):
        answer = _assigned(answer) or answer
    return bool(gold == answer)


def _is_same_quantity(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _is_same_relation(gold, answer)
    a, unit_a = _parted(gold)
    b, unit_b = _parted(answer)
    if unit_a and unit_b:
        return unit_a == unit_b and is_same(a, b)
    if isinstance(a, Group) or isinstance(b, Group):
        return False
    unit = unit_a or unit_b
    # With the percent sign on one side only, both 50 and 0.5 are meant as 50 %.
    if unit == "%" and _is_number(a) and _is_number(b):
        with_unit, without = (a, b) if unit_a else (b, a)
        return is_same(with_unit, without) or is_same(with_unit / 100, without)
    if is_same(a, b):
        return True
    if not _is_number(a if unit_a else b):
        return False
    # A letter after a number may be a unit or a variable, as in 5 m.
    factor = sympy.pi / 180 if unit == "degree" else _unit_product(unit)
    if factor is None:
        return False
    return is_same(*((a * factor, b) if unit_a else (a, b * factor)))


def _parted(value: Value) -> tuple[Value, str]:
    if isinstance(value, Quantity):
        return value.value, value.unit
    return value, ""


def _is_number(value: Value) -> bool:
    return isinstance(value, sympy.Expr) and not value.free_symbols


def _unit_product(unit: str) -> Any:
    product, power = sympy.Integer(1), 1
    for part in unit.split():
        if part == "per":
            power = -1
        elif part in _UNIT_LETTERS:
            product *= sympy.Symbol(_UNIT_LETTERS[part]) ** power
        else:
            return None
    return product


# Several values -----------------------------------------------------------------------


def _is_same_group(gold: Value, answer: Value) -> bool:
    if isinstance(answer, Relation):
        value = _assigned(answer)
        if value is not None:
            return is_same(gold, value)
        answer = _as_interval(answer)
    elif isinstance(gold, Relation):
        return _is_same_relation(gold, answer)
    if not isinstance(gold, Group) or not isinstance(answer, Group):
        return False
    if len(gold.items) != len(answer.items):
        return False
    names = [{_name(item) for item in group.items} for group in (gold, answer)]
    # Values of several variables without their names are distinguished by order only.
    is_named = [None not in found and len(found) > 1 for found in names]
    brackets = {gold.bracket, answer.bracket}
    if brackets <= {"", "{}"} and is_named[0] == is_named[1]:
        return _is_same_unordered(gold.items, answer.items)
    # `1, 2` is a common spelling of the point (1, 2), but not of an interval.
    if len(brackets) == 1 or brackets <= {"", "()"}:
        return all(map(is_same, gold.items, answer.items))
    # `{2, 1}` does not say which is which of `x = 2, y = 1`.
    return False


def _is_same_unordered(gold: Sequence[Value], answer: Sequence[Value]) -> bool:
    left = list(answer)
    if len(left) > _MAX_UNORDERED:
        return list(gold) == left
    # Greedy is enough: equality of values is transitive up to rounding.
    for item in gold:
        place = next((i for i, other in enumerate(left) if is_same(item, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _is_same_operation(gold: Value, answer: Value) -> bool:
    gold, answer = _as_sets(gold), _as_sets(answer)
    if not isinstance(gold, SetOperation) or not isinstance(answer, SetOperation):
        return False
    if gold.name != answer.name:
        return False
    first, second = _flat(gold), _flat(answer)
    if len(first) != len(second):
        return False
    # Union and intersection commute, a difference does not.
    if gold.name == "difference":
        return all(map(is_same, first, second))
    return _is_same_unordered(first, second)


def _as_sets(value: Value) -> Value:
    """Return `x < 1 or x > 2` as a union."""
    if isinstance(value, Relation):
        return _assigned(value) or value
    if not isinstance(value, Group) or value.bracket:
        return value
    parts = [_as_interval(item) for item in value.items]
    if any(part is None for part in parts) or len(_variables(value)) != 1:
        return value
    return SetOperation("union", tuple(parts))


def _variables(relations: Group) -> set[Value]:
    return {
        side
        for relation in relations.items
        for side in relation.sides
        if isinstance(side, sympy.Symbol)
    }


def _flat(operation: SetOperation) -> list[Value]:
    if operation.name == "difference":
        return list(operation.parts)
    found: list[Value] = []
    for part in operation.parts:
        if isinstance(part, SetOperation) and part.name == operation.name:
            found.extend(_flat(part))
        else:
            found.append(part)
    return found


def _is_same_matrix(gold: Value, answer: Value) -> bool:
    if not (
        isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase)
    ):
        return False
    return gold.shape == answer.shape and all(map(is_same, gold.flat(), answer.flat()))


# Relations ----------------------------------------------------------------------------


def _is_same_relation(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _are_same_relations(gold, answer)
    if isinstance(gold, Relation):
        relation, other = gold, answer
    else:
        relation, other = answer, gold
    value = _assigned(relation)
    # Only an answer may show its work; as a solution `2 + 3 = 5` is an equation.
    if value is None and relation is answer:
        value = _calculated(relation)
    if value is None:
        value = _as_interval(relation)
        if not isinstance(other, Group):
            return False
    if value is None:
        return False
    return is_same(value, other) if relation is gold else is_same(other, value)


def _assigned(relation: Relation) -> Value | None:
    """Return the value after a name, as in `x = 5` or `x = 10/2 = 5`."""
    if _name(relation) is None or (len(relation.signs) > 1 and not _agree(relation)):
        return None
    return relation.sides[-1]


def _calculated(relation: Relation) -> Value | None:
    """Return the value of an answer that shows its work: `48/2 = 24`, `x + y = 5`."""
    if set(relation.signs) != {"="}:
        return None
    first, last = relation.sides[0], relation.sides[-1]
    if all(_is_number(_parted(side)[0]) for side in relation.sides):
        return last if _agree(relation, start=0) else None
    if isinstance(first, sympy.Expr) and not first.atoms(sympy.Number):
        return last if len(relation.sides) == len(("left", "right")) else None
    return None


def _agree(relation: Relation, *, start: int = 1) -> bool:
    """Return True if the sides of a chain are the same from `start` on."""
    last = relation.sides[-1]
    return all(is_same(last, side) for side in relation.sides[start:-1])


def _name(value: Value) -> str | None:
    """Return the name to which a relation assigns a value."""
    if not isinstance(value, Relation) or value.signs[0] not in ("=", "in"):
        return None
    if set(value.signs) != {value.signs[0]}:
        return None
    first = value.sides[0]
    if isinstance(first, sympy.Symbol | Words):
        return str(first)
    last = value.sides[-1]
    if (
        isinstance(first, Group)
        and isinstance(last, Group)
        and first.bracket == "()"
        and len(first.items) == len(last.items)
        and all(isinstance(item, sympy.Symbol) for item in first.items)
    ):
        return str(first.items)
    return None


def _are_same_relations(gold: Relation, answer: Relation) -> bool:
    name_a, name_b = _name(gold), _name(answer)
    if name_a is not None and name_a == name_b:
        a, b = _assigned(gold), _assigned(answer)
        if a is not None and b is not None and is_same(a, b):
            return True
    if len(gold.signs) != len(answer.signs):
        return False
    return any(_are_same_chains(gold, turned) for turned in (answer, _turned(answer)))


def _turned(relation: Relation) -> Relation:
    signs = tuple(_FLIPPED.get(sign, sign) for sign in reversed(relation.signs))
    return Relation(signs, tuple(reversed(relation.sides)))


def _are_same_chains(gold: Relation, answer: Relation) -> bool:
    if gold.signs != answer.signs:
        return False
    for place, sign in enumerate(gold.signs):
        sides = [relation.sides[place : place + 2] for relation in (gold, answer)]
        if all(map(is_same, *sides)):
            continue
        if not all(isinstance(side, sympy.Expr) for pair in sides for side in pair):
            return False
        # x + y = 2 and 2 x + 2 y = 4 are the same equation; for inequalities a negative
        # factor would turn the sign.
        a, b = (pair[0] - pair[1] for pair in sides)
        if not are_proportional(a, b, positive=sign not in ("=", "!=")):
            return False
    return True


def _as_interval(value: Value) -> Group | None:
    """Return the interval of a relation in one variable; None: it is none."""
    if not isinstance(value, Relation) or not set(value.signs) <= _ORDERS:
        return None
    relation = value
    if relation.signs[0] in (">", ">=") and len(relation.signs) > 1:
        relation = _turned(relation)
    sides, signs = relation.sides, relation.signs
    lower, upper = -sympy.oo, sympy.oo
    open_below = open_above = True
    if len(signs) == 1:
        if isinstance(sides[1], sympy.Symbol):
            relation = _turned(relation)
            sides, signs = relation.sides, relation.signs
        if not isinstance(sides[0], sympy.Symbol) or not _is_number(sides[1]):
            return None
        if signs[0] in ("<", "<="):
            upper, open_above = sides[1], signs[0] == "<"
        else:
            lower, open_below = sides[1], signs[0] == ">"
    elif len(sides) == len(("lower", "variable", "upper")):
        if not isinstance(sides[1], sympy.Symbol) or not {*signs} <= {"<", "<="}:
            return None
        lower, upper = sides[0], sides[2]
        open_below, open_above = signs[0] == "<", signs[1] == "<"
    else:
        return None
    return Group(_BRACKET[open_below, open_above], (lower, upper))


_ORDERS = {"<", "<=", ">", ">="}
_BRACKET: dict[tuple[bool, bool], Bracket] = {
    (True, True): "()",
    (False, False): "[]",
    (True, False): "(]",
    (False, True): "[)",
}
# Ordered: the first class to which either value belongs decides, since a set may
# contain groups, a group quantities, and so on.
_COMPARISONS: tuple[tuple[type, Callable[[Value, Value], bool]], ...] = (
    (SetOperation, _is_same_operation),
    (Group, _is_same_group),
    (Quantity, _is_same_quantity),
    (Relation, _is_same_relation),
    (Words, _is_same_words),
)
