"""Rules for the results of a program, evaluated without the program's help.

A rule is a small subset of Python: literals, comparisons, arithmetic and a few
builtins. Without attributes, loops and powers, neither a row nor a program's result can
make it do anything else, or use unlimited time or memory.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["BUILTINS", "check_rule", "holds"]

BUILTINS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "Counter": Counter,
    "all": all,
    "any": any,
    "bool": bool,
    "dict": dict,
    "float": float,
    "frozenset": frozenset,
    "int": int,
    "len": len,
    "list": list,
    "max": max,
    "min": min,
    "round": round,
    "set": set,
    "sorted": sorted,
    "str": str,
    "sum": sum,
    "tuple": tuple,
    "math.isclose": lambda a, b, rel_tol, abs_tol: math.isclose(
        a, b, rel_tol=rel_tol, abs_tol=abs_tol
    ),
}
"""Functions that a rule may call; calls of others are made in the sandbox."""

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
# Multiplying texts, lists or larger numbers could exhaust memory.
_LARGEST = 1e300


def check_rule(rule: ast.expr) -> None:
    """Reject rules that `holds` cannot evaluate.

    Raises:
        ValueError: The rule has an unsupported part, which the message names.
    """
    for node in ast.walk(rule):
        if isinstance(node, ast.Call):
            if node.keywords or not isinstance(node.func, ast.Name):
                raise ValueError(f"{ast.unparse(node)} is not a call of a builtin")
        elif isinstance(node, ast.Name):
            is_result = node.id.startswith("_") and node.id[1:].isdigit()
            if not is_result and node.id not in BUILTINS:
                raise ValueError(f"the name {node.id} is not known there")
        elif isinstance(node, ast.operator | ast.unaryop | ast.cmpop):
            if type(node) not in _OPERATORS:
                raise ValueError(f"it has the operator {type(node).__name__}")
        elif not isinstance(node, _KNOWN):
            raise ValueError(f"it has a {type(node).__name__}")


_KNOWN = (
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.Constant,
    ast.Dict,
    ast.IfExp,
    ast.List,
    ast.Set,
    ast.Slice,
    ast.Subscript,
    ast.Tuple,
    ast.UnaryOp,
    ast.boolop,
    ast.expr_context,
)


def holds(rule: ast.expr, results: Sequence[Any]) -> bool:
    """Return True if a rule holds for the results of its calls.

    A rule that raises, as by comparing a text with a number, does not hold.
    """
    try:
        return bool(_value(rule, results))
    # What values of a program can provoke; anything else is a defect here and must
    # show.
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
        return False


def _value(node: ast.AST, results: Sequence[Any]) -> Any:
    def of(part: ast.AST) -> Any:
        return _value(part, results)

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return BUILTINS[node.id] if node.id in BUILTINS else results[int(node.id[1:])]
    if isinstance(node, ast.Tuple):
        return tuple(map(of, node.elts))
    if isinstance(node, ast.List):
        return list(map(of, node.elts))
    if isinstance(node, ast.Set):
        return set(map(of, node.elts))
    if isinstance(node, ast.Dict):
        keys = [of(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(of, node.values), strict=True))
    if isinstance(node, ast.Call):
        return of(node.func)(*map(of, node.args))
    return _operation(node, of)


def _operation(node: ast.AST, of: Callable[[ast.AST], Any]) -> Any:
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](of(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = of(node.left), of(node.right)
        if not isinstance(node.op, ast.Add):
            _check_numbers(left, right)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare):
        values = [of(part) for part in (node.left, *node.comparators)]
        pairs = itertools.pairwise(values)
        return all(
            _OPERATORS[type(op)](*pair)
            for op, pair in zip(node.ops, pairs, strict=True)
        )
    if isinstance(node, ast.BoolOp):
        is_and = isinstance(node.op, ast.And)
        found = is_and
        for part in node.values:
            found = of(part)
            if bool(found) is not is_and:
                break
        return found
    return _choice(node, of)


def _choice(node: ast.AST, of: Callable[[ast.AST], Any]) -> Any:
    if isinstance(node, ast.IfExp):
        return of(node.body) if of(node.test) else of(node.orelse)
    if isinstance(node, ast.Subscript):
        return of(node.value)[of(node.slice)]
    if isinstance(node, ast.Slice):
        parts = (node.lower, node.upper, node.step)
        return slice(*(None if part is None else of(part) for part in parts))
    raise ValueError(f"a rule has a {type(node).__name__}")


def _check_numbers(*values: Any) -> None:
    for value in values:
        # Sets have a difference, which cannot grow.
        if isinstance(value, set | frozenset):
            continue
        is_number = isinstance(value, int | float | complex)
        if not is_number or (
            not isinstance(value, complex)
            and math.isfinite(value)
            and abs(value) > _LARGEST
        ):
            raise ValueError(f"{value!r:.20} is not a number to compute with")
