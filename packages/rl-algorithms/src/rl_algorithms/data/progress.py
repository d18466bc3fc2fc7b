"""A progress line on the terminal for long loops."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

__all__ = ["track"]

T = TypeVar("T")
_DELAY_S = 2.0
_PERIOD_S = 0.2


def track(
    items: Iterable[T],
    what: str,
    *,
    total: int | None = None,
    step: int = 1,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the items; show a progress line once the loop has taken two seconds.

    Nothing is shown if standard error is not a terminal or is owned by a live display.

    Args:
        items: Items to iterate over.
        what: Description of the work, such as `tokenising dataset 'rows.jsonl'`.
        total: Total number of rows, if known.
        step: Rows per item.
        stream: Output stream; default standard error.
        clock: Clock in seconds, from any origin.
    """
    out = stream if stream is not None else sys.stderr
    # A live display replaces sys.stderr by an object of another class.
    if stream is None and not (isinstance(out, io.TextIOWrapper) and out.isatty()):
        yield from items
        return
    began_s = shown_s = clock()
    drawn = False
    try:
        for number, item in enumerate(items):
            yield item
            now_s = clock()
            if now_s - began_s >= _DELAY_S and now_s - shown_s >= _PERIOD_S:
                shown_s, drawn = now_s, True
                line = _line(what, (number + 1) * step, total, now_s - began_s)
                out.write(f"\r\x1b[K{line}")
                out.flush()
    finally:
        # Also after an error, whose message must not share the line with the bar.
        if drawn:
            out.write("\r\x1b[K")
            out.flush()


def _line(what: str, done: int, total: int | None, elapsed_s: float) -> str:
    if total is None:
        return f"{what}: {done:,} rows"
    done = min(done, total)
    left_s = elapsed_s / done * (total - done)
    filled = 20 * done // total
    bar = "#" * filled + "." * (20 - filled)
    return f"{what} [{bar}] {done:,} of {total:,} rows, {left_s:.0f} s left"
