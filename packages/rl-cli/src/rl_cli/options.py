"""Option types whose messages state the rule and the value."""

from __future__ import annotations

import math
from typing import Any

import click

__all__ = ["LARGEST", "LARGEST_SEED", "Number", "Whole"]

LARGEST = 2**31 - 1
"""Default maximum, beyond which no count makes sense."""
LARGEST_SEED = 2**63 - 1


class Whole(click.ParamType[int]):
    """An integer between two limits.

    Args:
        least: Minimum.
        most: Maximum.
    """

    name = "integer"

    def __init__(self, least: int = 1, most: int = LARGEST) -> None:
        self.least, self.most = least, most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read an integer; anything else is a usage error."""
        try:
            found = int(value)
        except ValueError:
            return self.fail(f"must be an integer: got {value}", param, ctx)
        if not self.least <= found <= self.most:
            rule = f"must be an integer from {self.least:,} to {self.most:,}"
            return self.fail(f"{rule}: got {value}", param, ctx)
        return found


class Number(click.ParamType[float]):
    """A finite number within limits.

    Args:
        above: Exclusive minimum; None: see `least`.
        least: Inclusive minimum.
        most: Inclusive maximum; None: no limit.
    """

    name = "number"

    def __init__(
        self,
        *,
        above: float | None = None,
        least: float = 0.0,
        most: float | None = None,
    ) -> None:
        self.above, self.least, self.most = above, least, most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a number; anything else is a usage error."""
        lower = f"of at least {self.least:g}" if self.above is None else (
            f"greater than {self.above:g}"
        )  # fmt: skip
        upper = "" if self.most is None else f" and at most {self.most:g}"
        rule = f"must be a number {lower}{upper}: got {value}"
        try:
            found = float(value)
        except ValueError:
            return self.fail(rule, param, ctx)
        too_low = found < self.least if self.above is None else found <= self.above
        too_high = self.most is not None and found > self.most
        if too_low or too_high or not math.isfinite(found):
            return self.fail(rule, param, ctx)
        return found
