"""Guards around metrics sinks: losing a curve must not end a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics.sink import CannotShowError, MetricSink

__all__ = ["FailurePolicy", "GuardedSink"]

FailurePolicy = Literal["retry", "drop", "raise"]

# A sink that has failed so often in a row is gone; each try may cost a time-out.
_MOST_FAILURES_IN_A_ROW = 20
_WHAT = {
    "log_histogram": "histograms",
    "log_plot": "plots",
    "log_table": "tables",
    "log_text": "texts",
}

_logger = get_logger(__name__)


class GuardedSink:
    """A sink whose failures are counted, reported once, and kept from the caller.

    Args:
        name: Name of the sink in messages.
        sink: The sink.
        policy: See `LoggerConfig.on_sink_failure`.
    """

    def __init__(self, name: str, sink: MetricSink, policy: FailurePolicy) -> None:
        self.name = name
        self.sink = sink
        self.num_failures = 0
        self.works = True
        """False once the sink is left out."""
        self._policy = policy
        self._in_a_row = 0
        self._said: set[str] = set()

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of the sink, if it has it and still works.

        Raises:
            Exception: What the sink raised, under the policy "raise".
        """
        if not self.works:
            return
        function = getattr(self.sink, method, None)
        if function is None:
            self._say_cannot_show(method)
            return
        self._try(function, method, arguments)

    def close(self) -> None:
        """Close the sink and sum up what failed.

        Raises:
            Exception: What the sink raised, under the policy "raise".
        """
        if self.works and self.num_failures:
            _logger.warning(
                "metrics sink %r failed %d times; what it was given then is lost there",
                self.name,
                self.num_failures,
            )
        try:
            if self.works:
                self._try(self.sink.close, "close", ())
        finally:
            self.works = False

    def _try(
        self, function: Callable[..., object], method: str, arguments: tuple[Any, ...]
    ) -> None:
        try:
            function(*arguments)
        except CannotShowError:
            self._say_cannot_show(method)
        except Exception as error:
            # Any failure of a sink is its own, whatever a third-party one raises.
            self._failed(error)
            if self._policy == "raise":
                raise
        else:
            if method != "flush":
                # A flush of nothing says nothing about the sink's health.
                self._in_a_row = 0

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        self._in_a_row += 1
        if self._policy == "raise":
            return
        if self._policy == "drop" or self._in_a_row >= _MOST_FAILURES_IN_A_ROW:
            self.works = False
            _logger.warning(
                "metrics sink %r failed and is left out from now on (failures: %d): %r",
                self.name,
                self.num_failures,
                error,
                exc_info=error,
            )
            self._close_quietly()
        # Only once, or a server that is down for an hour would fill the log.
        elif self.num_failures == 1:
            _logger.warning(
                "metrics sink %r failed: %r; the run goes on, and the sink is tried "
                "again (logger.on_sink_failure); further failures are only counted",
                self.name,
                error,
                exc_info=error,
            )

    def _close_quietly(self) -> None:
        try:
            self.sink.close()
        except Exception as error:
            # It is gone already; its files and ports were the aim.
            _logger.debug("metrics sink %r does not close: %r", self.name, error)

    def _say_cannot_show(self, method: str) -> None:
        # A sink without `resume_at` has nothing to drop, so no message is needed.
        if method == "resume_at" or method in self._said:
            return
        self._said.add(method)
        _logger.info(
            "metrics sink %r cannot show %s; they are left out there",
            self.name,
            _WHAT.get(method, method),
        )
