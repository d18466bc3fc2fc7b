"""Warnings about results that differ from those of NeMo RL."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from rl_algorithms.compat.nemo_rl.name_map import GUIDE

__all__ = ["DifferenceWarning", "forget_differences", "warn_difference"]

_HERE = "rl_algorithms.compat.nemo_rl."


class DifferenceWarning(UserWarning):
    """A result differs from that of NeMo RL for the same input."""


_told: set[str] = set()


def warn_difference(message: str) -> None:
    """Warn about a difference, once per process."""
    if message in _told:
        return
    _told.add(message)
    text = f"{message} (see {GUIDE})"
    warnings.warn(text, DifferenceWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """Return the stack level, from `warn_difference`, of the caller of this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    # The warning is to point at the user's line, however deep the call inside this
    # package.
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_HERE):
        frame, level = frame.f_back, level + 1
    return level


def forget_differences() -> None:
    """Forget the warnings already issued."""
    _told.clear()
