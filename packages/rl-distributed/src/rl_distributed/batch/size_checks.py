"""Checks on counts, with the nearest right values in the message."""

from __future__ import annotations

import numpy as np

from rl_distributed.errors import BatchError

__all__ = ["require_multiple", "require_positive"]


def require_positive(
    name: str, value: object, error: type[BatchError] = BatchError
) -> None:
    """Raise `error` unless `value` is an integer of at least 1."""
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integer or value < 1:  # type: ignore[operator]
        raise error(f"{name} must be a positive integer: got {value!r}")


def require_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise `BatchError` unless `divisor` divides `value`."""
    if value % divisor == 0:
        return
    below, above = value - value % divisor, value - value % divisor + divisor
    options = f"{below} or {above}" if below else str(above)
    raise BatchError(
        f"{name} must be a multiple of {divisor_name}: got {value} with "
        f"{divisor_name}={divisor}; {options} would do"
    )
