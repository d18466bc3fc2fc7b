"""What says best how well a stage does on held-out data."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["format_measure", "measure_of"]

_MEASURES = ("accuracy", "reward", "val_loss", "loss")
"""What validations measure, the most telling first: a reward function has no notion of
a right answer, and what imitates samples none."""


def measure_of(names: Iterable[str]) -> str | None:
    """Return the most telling measure among names such as `val:reward`, or None."""
    present = set(names)
    return next((name for name in _MEASURES if f"val:{name}" in present), None)


def format_measure(measure: str, value: float | None) -> str:
    """Return a value of a measure for people; "" where there is none."""
    if value is None:
        return ""
    return f"{value:.1%}" if measure == "accuracy" else f"{value:.4g}"
