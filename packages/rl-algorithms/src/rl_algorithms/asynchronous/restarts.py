"""`RestartPolicy`: whether, and after which pause, a failed worker is restarted.

`rl_distributed.workers.policy` limits restarts within a call and by the clock. This
policy counts failures without a result in between, so that its decision depends only on
what the worker has done and a replay decides alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_distributed.errors import ConfigError

__all__ = ["RestartPolicy"]


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Restarts a worker until it has failed too often in a row."""

    max_restarts: int = 3
    """Maximum number of restarts in a row. A result of the worker resets the count; for
    the trainer, only a step that no earlier attempt has reached."""
    backoff_s: float = 1.0
    """Pause before the second restart in a row, doubled for each further one."""
    max_backoff_s: float = 60.0
    """Longest pause."""

    def __post_init__(self) -> None:
        if isinstance(self.max_restarts, bool) or self.max_restarts < 0:
            raise ConfigError(
                f"max_restarts must not be negative: got {self.max_restarts!r}"
            )
        for name in ("backoff_s", "max_backoff_s"):
            value = getattr(self, name)
            if not value >= 0:
                raise ConfigError(f"{name} must not be negative: got {value}")

    def pause_before(self, failures_in_row: int) -> float | None:
        """Return the seconds to wait before a restart, or None for no restart.

        Args:
            failures_in_row: Failures since the last result, including this one.
        """
        if failures_in_row > self.max_restarts:
            return None
        # The first failure is most often a lost node or a one-off: waiting would only
        # idle the run. Backoff is for a worker that fails as it starts.
        if failures_in_row <= 1:
            return 0.0
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** (failures_in_row - 2))
