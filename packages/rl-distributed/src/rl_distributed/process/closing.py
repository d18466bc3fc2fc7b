"""Closing at the end of a `with` block without hiding the block's own error."""

from __future__ import annotations

from collections.abc import Callable

from rl_distributed.logs.logging import get_logger

__all__ = ["close_after"]

_logger = get_logger(__name__)


def close_after(
    error: BaseException | None, close: Callable[[], object], what: str
) -> None:
    """Close something without hiding why its block ended; for `__exit__`.

    Args:
        error: The error of the block; None: it raised none. It is the cause that
            matters, so an error of `close` becomes a warning and a note on it.
        close: Releases the resources of the block.
        what: Name of these, for the warning.

    Raises:
        Exception: The error of `close`, after a block that raised nothing.
    """
    try:
        close()
    except Exception as failure:
        if error is None:
            raise
        shown = f"{type(failure).__name__}: {failure}"
        # Also logged below, as a caller may handle the error without showing its notes.
        error.add_note(f"Closing {what} failed after this: {shown}")
        _logger.warning(
            "closing %s failed, after %s: %s", what, type(error).__name__, shown
        )
