"""Second checks of correct answers, implemented independently of the rewards.

The functions are named by settings of the environment `second_check`, through the
environment `reward`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

__all__ = ["bare_answer", "bare_expression", "replayed_moves"]

_TOKEN = re.compile(r"[0-9]+|[-+*/()]")


def bare_answer(prompt: str, response: str, answer: str) -> float:
    """Accept only the answer, character by character, with nothing around it."""
    return float(response == answer)


def bare_expression(
    prompt: str, response: str, numbers: Sequence[int], target: int
) -> float:
    """Accept one expression, without signs, blanks or "= target" around it.

    Each number is used once; the value is computed by a parser of its own.
    """
    tokens = _TOKEN.findall(response)
    used = sorted(int(token) for token in tokens if token.isdecimal())
    if "".join(tokens) != response or used != sorted(numbers):
        return 0.0
    try:
        value = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        return 0.0
    return float(not tokens and value == target)


def _sum(tokens: list[str]) -> Fraction:
    value = _product(tokens)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens.pop(0) == "+" else -1
        value += sign * _product(tokens)
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _factor(tokens)
    while tokens and tokens[0] in "*/":
        is_product = tokens.pop(0) == "*"
        factor = _factor(tokens)
        value = value * factor if is_product else value / factor
    return value


def _factor(tokens: list[str]) -> Fraction:
    token = tokens.pop(0)
    if token != "(":
        return Fraction(int(token))
    value = _sum(tokens)
    if tokens.pop(0) != ")":
        raise ValueError("a bracket is not closed")
    return value


# Where the tile that moves into the gap comes from: row and column offsets.
_FROM = {"U": (1, 0), "D": (-1, 0), "L": (0, 1), "R": (0, -1)}


def replayed_moves(prompt: str, response: str, board: str) -> float:
    """Accept a conversation whose legal moves lead to the goal."""
    rows = [list(row) for row in board.split("/")]
    said = [line for line in prompt.splitlines() if not line.endswith(">")]
    for move in [*said, response]:
        if move not in _FROM:
            continue
        [(row, column)] = [
            (i, cells.index(".")) for i, cells in enumerate(rows) if "." in cells
        ]
        down, right = _FROM[move]
        i, j = row + down, column + right
        if not (0 <= i < len(rows) and 0 <= j < len(rows[0])):
            continue
        rows[row][column], rows[i][j] = rows[i][j], "."
    cells = "".join(map("".join, rows))
    return float(cells == "".join(sorted(cells.replace(".", ""))) + ".")
