"""Requests that may have their effect once: a time and a number used once on each.

A request is refused whose time lies more than `window_s` away, or before the start of
the listener, and one whose number (nonce) was used by the same key within the window.
So what is kept is bounded, and a listener that starts again forgets nothing that would
still be in time.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable

__all__ = ["NONCE_HEADER", "TIME_HEADER", "ReplayGuard"]

NONCE_HEADER, TIME_HEADER = "X-RL-Nonce", "X-RL-Time"
"""Headers of a request: a random number, and the time in seconds since 1970."""

WINDOW_S = 60.0
_MOST = 10_000
_NONCE = re.compile(r"[0-9a-f]{32}")
_TIME = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")


class ReplayGuard:
    """Notes which requests have come.

    Args:
        window_s: How far the clocks of both sides may lie apart.
        most: How many are noted; further ones are refused until some are too old.
        now_s: Clock of this side, in seconds since 1970.
    """

    def __init__(
        self,
        *,
        window_s: float = WINDOW_S,
        most: int = _MOST,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._window_s, self._most, self._now_s = window_s, most, now_s
        self._began_s = now_s()
        self._used: OrderedDict[tuple[str, str], float] = OrderedDict()

    def problem(self, key: str, nonce: str, sent: str) -> tuple[str, str] | None:
        """Note a request; return why it is refused, as a code and a sentence.

        Args:
            key: Id of the key that it came with.
            nonce: Its number: 32 hexadecimal digits, used once.
            sent: When it was sent.
        """
        if not _NONCE.fullmatch(nonce) or not _TIME.fullmatch(sent):
            return "nonce_missing", (
                f"The request needs the headers {NONCE_HEADER} (32 hexadecimal "
                f"digits, never used before) and {TIME_HEADER} (seconds since 1970)."
            )
        now, sent_s = self._now_s(), float(sent)
        if abs(now - sent_s) > self._window_s:
            return "too_old", (
                f"The request was sent {now - sent_s:.0f} s ago by this machine's "
                f"clock, and may be {self._window_s:g} s away: set the clocks, or send "
                "it again."
            )
        if sent_s < self._began_s - 1.0:
            return "too_old", "The request is older than this listener: send it again."
        self._forget(now)
        if (key, nonce) in self._used:
            return "replayed", "The request has come before, and has its effect once."
        if len(self._used) >= self._most:
            return "too_many", "Too many requests within a minute: come back later."
        self._used[key, nonce] = max(now, sent_s)
        return None

    def _forget(self, now: float) -> None:
        # A clock ahead may date a request later than this one notes it.
        while self._used:
            first = next(iter(self._used))
            if now - self._used[first] <= 2 * self._window_s:
                return
            del self._used[first]
