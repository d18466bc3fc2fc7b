"""The nearest right name, for messages about a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

__all__ = ["did_you_mean", "did_you_mean_file", "nearest"]

_CUTOFF = 0.6
_MOST_FILES = 1000


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


def did_you_mean_file(path: str | Path) -> str:
    """`"; did you mean 'x.py'?"` of the files beside a missing one, or an empty string.

    Only files with the same ending are near, or with the same name before it: endings
    alone make most names alike.
    """
    missing = Path(path)
    try:
        files = [
            file
            for file in islice(missing.expanduser().parent.iterdir(), _MOST_FILES)
            if file.suffix == missing.suffix or file.stem == missing.stem
        ]
    except OSError:
        # There is no such folder, or it is not ours to read.
        return ""
    stem = nearest(missing.stem, (file.stem for file in files))
    if stem is None:
        return ""
    # With the ending that was written, if there is one.
    names = sorted(
        (file.suffix != missing.suffix, file.name)
        for file in files
        if file.stem == stem
    )
    return f"; did you mean {str(missing.with_name(names[0][1]))!r}?"
