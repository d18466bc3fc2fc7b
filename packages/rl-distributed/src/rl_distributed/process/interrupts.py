"""Deferring signals while a block of code must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["deferred_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let a block finish before SIGINT, SIGTERM or SIGHUP takes effect.

    A library that starts processes does not survive an exception that a signal handler
    raises halfway through: some processes run by then and are never cleaned up. A
    second signal takes effect at once, unless it is a SIGHUP: a terminal that is closed
    sends several by itself. Outside of the main thread, which alone receives signals,
    this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1 and number != signal.SIGHUP:
            put_back()
            signal.raise_signal(number)

    def put_back() -> None:
        for number, handler in before.items():
            # Handlers that the block itself installs, as Ray does for
            # SIGTERM, stay in place.
            if signal.getsignal(number) is remember:
                signal.signal(number, handler)

    # None: a handler that was not set by Python, and cannot be put back by it.
    current = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {n: handler for n, handler in current.items() if handler is not None}
    for number in before:
        signal.signal(number, remember)
    try:
        yield
    finally:
        put_back()
    # Raised again after the original handlers are back, so that it has
    # its usual effect.
    if came:
        signal.raise_signal(came[0])
