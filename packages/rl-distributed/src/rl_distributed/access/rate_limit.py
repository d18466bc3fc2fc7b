"""Rate limits: a number of requests per unit of time, with bursts up to that number."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from rl_distributed.errors import ConfigError

__all__ = ["RateLimit", "TokenBucket"]

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_FORM = re.compile(r"([1-9][0-9]{0,8})/(s|min|h|d)")


@dataclass(frozen=True)
class RateLimit:
    """A number of requests per time, as in `60/min`."""

    count: int
    """Number of requests, and largest burst."""
    unit: str
    """`s`, `min`, `h` or `d`."""

    @classmethod
    def parse(cls, text: str) -> RateLimit:
        """Read a limit such as `60/min`.

        Raises:
            ConfigError: It has another form.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(
                "a rate must be NUMBER/UNIT, with the unit s, min, h or d, as in "
                f"60/min: got {text!r}"
            )
        return cls(int(match[1]), match[2])

    @property
    def per_second(self) -> float:
        """Requests per second in the long run."""
        return self.count / _UNITS[self.unit]

    def __str__(self) -> str:
        return f"{self.count}/{self.unit}"


class TokenBucket:
    """Admits requests at a rate; an unused rate is saved up to one burst.

    Args:
        limit: The rate.
        now_s: Clock.
    """

    def __init__(
        self, limit: RateLimit, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit, self._now_s = limit, now_s
        self._tokens, self._filled_s = float(limit.count), now_s()

    def take(self) -> float:
        """Admit a request and return 0.0, or return the seconds until one may come."""
        now = self._now_s()
        gained = (now - self._filled_s) * self.limit.per_second
        self._tokens = min(self._tokens + gained, float(self.limit.count))
        self._filled_s = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self.limit.per_second
