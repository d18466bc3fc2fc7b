"""Stretches of code that a signal must not break off in their middle."""

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
    """Let a block come to its end before SIGINT, SIGTERM or SIGHUP takes effect.

    A library that starts processes does not survive an exception that a signal handler
    raises in its middle: some are started, and nobody knows of them. A second signal
    takes effect at once, unless it is a SIGHUP: a terminal that is closed sends several
    by itself. In another thread than the main one, which no signal reaches, this does
    nothing.
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
            # What the block itself has set, as Ray does for SIGTERM, stays.
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
    if came:
        signal.raise_signal(came[0])
