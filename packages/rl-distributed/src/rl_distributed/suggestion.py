"""The nearest right name, for messages about a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]

_CUTOFF = 0.6


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that `name` was most likely meant to be, or None."""
    candidates = sorted(set(known))
    by_plain = {_plain(candidate): candidate for candidate in candidates}
    same = by_plain.get(_plain(name))
    if same is not None:
        return same
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=_CUTOFF)
    if not close:
        close = [
            by_plain[plain]
            for plain in difflib.get_close_matches(
                _plain(name), list(by_plain), n=1, cutoff=_CUTOFF
            )
        ]
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or an empty string where nothing is near."""
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {found!r}?"
