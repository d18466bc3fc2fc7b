"""What happens to requests that are refused: counted, logged, noted in the audit log.

All are counted. Anybody who reaches a listener can have requests refused, so lines in
the log and entries of the audit log are few per minute; what was left out is counted
in the next.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from rl_distributed.access.rate_limit import RateLimit, TokenBucket
from rl_distributed.logs.logging import get_logger
from rl_distributed.security.audit import audit

__all__ = ["RequestCounts", "shown_text"]

_logger = get_logger(__name__)

_LINES = RateLimit(60, "min")
_LONGEST = 100


class RequestCounts:
    """Counts the requests to a listener by outcome, and logs those refused.

    Args:
        listener: What listens, such as `serve`.
        now_s: Clock for the limit on lines.
    """

    def __init__(
        self, listener: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.listener = listener
        self._counts: Counter[str] = Counter()
        self._left_out = 0
        self._lines = TokenBucket(_LINES, now_s)
        # Servers of some listeners answer in several threads.
        self._lock = threading.Lock()

    def admitted(self) -> None:
        """Count a request that was admitted."""
        with self._lock:
            self._counts["admitted"] += 1

    def refused(self, reason: str, what: str, client: str, key: str = "") -> None:
        """Count a request that was refused, and log it.

        Args:
            reason: A short name, such as `key_expired`.
            what: Method and path, without its query.
            client: Address of the sender.
            key: Id and name of the key, where it is one of the listener's.
        """
        with self._lock:
            self._counts[reason] += 1
            if self._lines.take():
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
        shown, sender = shown_text(what), shown_text(client)
        more = {"left_out_before": left_out} if left_out else {}
        who = {"key": key} if key else {}
        _logger.warning(
            "%s refused %s from %s: %s%s%s",
            *(self.listener, shown, sender, reason, f" (key {key})" if key else ""),
            f"; {left_out} further were refused before" if left_out else "",
        )
        audit(
            "access.refused",
            f"{self.listener} {shown}",
            "refused",
            reason=reason,
            client=sender,
            **who,
            **more,
        )

    def counts(self) -> dict[str, int]:
        """Return the number of requests by outcome: `admitted`, or why not."""
        with self._lock:
            return dict(self._counts)

    def exposition(self, *, is_open: bool = False) -> str:
        """Return the counts in the format of Prometheus.

        Args:
            is_open: In that of OpenMetrics, whose counters are named otherwise.
        """
        name = "rl_access_requests"
        lines = [f"# TYPE {name}{'' if is_open else '_total'} counter"]
        for outcome, number in sorted(self.counts().items()):
            labels = f'listener="{self.listener}",outcome="{outcome}"'
            lines.append(f"{name}_total{{{labels}}} {number}")
        return "\n".join(lines) + "\n"


def shown_text(text: str) -> str:
    """Return what a sender chose as one short line of printable characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:_LONGEST])
