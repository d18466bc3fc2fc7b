"""`ResourceSampler`: measure the resources in use on a node in the background.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| thread | probes | metrics | the next interval | `stop` |
| `stop` | | | the thread | its end, or the deadline |

The thread is a daemon, so that a probe that hangs keeps no program from ending. Probes
are read outside of the logger's lock: the run waits for a sample at most as long as it
would to write its own metrics.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics.probes import (
    GpuProbe,
    HostProbe,
    ObjectStoreProbe,
    Probe,
    ProbeUnavailableError,
)

__all__ = ["BetweenStepsLogger", "ResourceSampler"]

_logger = get_logger(__name__)


class BetweenStepsLogger(Protocol):
    """Takes metrics that belong to no step: a `LoggerFacade`."""

    def log_between_steps(self, metrics: Mapping[str, Any], prefix: str = "") -> None:
        """Write metrics with the newest step."""


class ResourceSampler:
    """Samples a node's resources every so often and logs them.

    It measures the node that it runs on; a worker can run one of its own, with a prefix
    of its own. Leaving it as a context manager stops it.

    Args:
        logger: Where the samples go.
        interval_s: Seconds from one sample to the next. A sample that takes longer
            skips those that it overran.
        prefix: Put before each name with a slash.
        probes: What to measure; None: processors, memory, GPUs where there is NVML, and
            Ray's object store while Ray is up.
        clock: Seconds from any fixed moment on; never goes back.
        wait: Waits the given seconds and returns whether to end; None: until `stop`.

    Raises:
        ConfigError: The interval is not positive.
    """

    def __init__(
        self,
        logger: BetweenStepsLogger,
        interval_s: float = 10.0,
        *,
        prefix: str = "system",
        probes: Sequence[Probe] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        if not interval_s > 0:
            raise ConfigError(f"interval_s must be positive: got {interval_s!r}")
        self._logger = logger
        self._interval_s = interval_s
        self._prefix = prefix
        self._probes: list[Probe] = list(
            (HostProbe(), GpuProbe(), ObjectStoreProbe()) if probes is None else probes
        )
        self._clock = clock
        self._ended = threading.Event()
        self._wait = wait or self._ended.wait
        self._thread: threading.Thread | None = None
        self._failed: set[str] = set()

    def start(self) -> None:
        """Begin to sample; the first sample is taken after one interval."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="resource-sampler", daemon=True
            )
            self._thread.start()

    def stop(self, deadline_s: float = 10.0) -> bool:
        """End the thread; a second call does nothing.

        Returns:
            Whether it has ended. A probe that hangs is left to end with the program.
        """
        self._ended.set()
        if self._thread is None:
            return True
        # With a deadline, because a probe may hang in a driver.
        self._thread.join(deadline_s)
        ended = not self._thread.is_alive()
        if not ended:
            _logger.warning(
                "the resource sampler has not ended in %g s; it is left alone",
                deadline_s,
            )
        self._thread = None
        return ended

    def sample(self) -> dict[str, float]:
        """Read all probes now, and log their measurements."""
        found: dict[str, float] = {}
        # A copy, because `_read` removes probes that are unavailable.
        for probe in list(self._probes):
            found.update(self._read(probe))
        if found:
            self._logger.log_between_steps(found, self._prefix)
        return found

    def _read(self, probe: Probe) -> dict[str, float]:
        name = type(probe).__name__
        try:
            return probe.read()
        except ProbeUnavailableError as error:
            _logger.debug("no %s: %s", name, error)
            self._probes.remove(probe)
        except Exception as error:
            # Whatever a probe stumbles over, the run has nothing to do with it.
            if name not in self._failed:
                self._failed.add(name)
                _logger.warning("%s failed, and is tried again: %r", name, error)
        return {}

    def _run(self) -> None:
        due = self._clock() + self._interval_s
        try:
            while not self._wait(max(0.0, due - self._clock())):
                self._sample_safely()
                # Missed samples are skipped: late ones would not describe
                # the times they missed.
                missed = max(0.0, self._clock() - due) // self._interval_s
                due += (missed + 1) * self._interval_s
        finally:
            for probe in self._probes:
                probe.close()

    def _sample_safely(self) -> None:
        try:
            self.sample()
        except Exception as error:
            # A sink under the policy "raise", say; the run hears of it by itself.
            if "logger" not in self._failed:
                self._failed.add("logger")
                _logger.warning("samples cannot be logged: %r", error)

    def __enter__(self) -> ResourceSampler:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
