"""How a `with` block ends whose end can fail too."""

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
        error: What the block raised. It is the cause to know of, so what `close` raises
            beside it becomes a warning and a note on it.
        close: Ends what the block has used.
        what: What that is, for the warning.

    Raises:
        Exception: What `close` raised, after a block that raised nothing.
    """
    try:
        close()
    except Exception as failure:
        if error is None:
            raise
        shown = f"{type(failure).__name__}: {failure}"
        error.add_note(f"Closing {what} failed after this: {shown}")
        _logger.warning(
            "closing %s failed, after %s: %s", what, type(error).__name__, shown
        )
