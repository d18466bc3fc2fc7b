"""`Watchdog`: ends a run that makes no progress, and reports who waits for whom.

```
phases, answers, verdicts ─note─> StallWatch ─limit─> report ─> log, RUN/stall.txt
                                                         └────> signal to `fit`
`fit` reacts ───────> checkpoint, where one is safe ─> StalledError, exit code 1
`fit` does not ─────> after 60 s: workers and process are killed, exit code 1
`fit` cannot end ───> after the limit once more, at most 30 minutes: the same
```

| part     | consumes | produces         | waits for        | is unblocked by   |
|----------|----------|------------------|------------------|-------------------|
| watchdog | notes    | report, a signal | the limit        | close             |
| `fit`    | a signal | an error         | what hangs       | the signal        |
| watchdog | -        | the end, by kill | the end of `fit` | close, its limits |

The first signal of a person takes effect at the end of a protected phase, because the
weights are changing. A hang in such a phase never reaches that end, so the watchdog's
signal raises at once, and nothing is saved of what is half done. Native code that never
returns to Python hears no signal at all, hence the end by kill.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from rl_algorithms.errors import StalledError
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_distributed.logs.logging import get_logger
from rl_distributed.private_files import write_private_text
from rl_distributed.process.stacks import thread_stacks
from rl_distributed.process.stall_watch import StallWatch
from rl_distributed.runs.ending import note_ending
from rl_distributed.workers.wait_report import kill_workers, report_waits

__all__ = ["STALL_REPORT", "RunView", "Watchdog"]

STALL_REPORT = "stall.txt"
"""Name of the report in the folder of the run."""

_logger = get_logger(__name__)
# Repeated, because an exception raised by a signal handler can get lost, for instance
# in a finalizer.
_AGAIN_S = 5.0
_NUM_SIGNALS = 12
_SHORTEST_END_S, _LONGEST_END_S = 60.0, 1_800.0
_EXIT_CODE = 1


@dataclass(frozen=True)
class RunView:
    """The run as the watchdog sees it; called in the watchdog's thread."""

    where: Callable[[], str]
    """Returns what the run is doing."""
    waits: Callable[[], Sequence[str]]
    """Returns lines on what the algorithm waits for besides calls of workers."""
    folder: Callable[[], Path]
    """Returns the folder of the run."""


class Watchdog:
    """Ends a run after some time without progress.

    Args:
        limit_s: Seconds without progress; None for no watchdog.
        signals: Signal guard of the run.
        view: What the run says about itself.
    """

    def __init__(
        self, limit_s: float | None, signals: SignalGuard, view: RunView
    ) -> None:
        self._limit_s, self._signals, self._view = limit_s, signals, view
        self._watch: StallWatch | None = None
        self._has_reacted = False
        self.where: str | None = None
        """What the run did when it stalled; None while it has not."""

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.close()
        # It leads back to the run: a reference cycle, which would keep the trainer and
        # its cluster alive until the garbage collector runs.
        del self._view

    def begin(self) -> None:
        """Begin to watch; before, while a run starts, its parts have own deadlines."""
        if self._watch is None:
            self._watch = StallWatch(self._limit_s, self._end)

    def note(self) -> None:
        """Note progress: something that was waited for has come."""
        if self._watch is not None:
            self._watch.note()

    def error(self, checkpoint: Path | None, why_unsaved: str | None) -> StalledError:
        """Return the error that ends the run.

        Args:
            checkpoint: Newest checkpoint.
            why_unsaved: Why none was made now; None if one was, or none is kept.
        """
        self._has_reacted = True
        last = "there is none" if checkpoint is None else f"the newest is {checkpoint}"
        saved = (
            f"no checkpoint was made, because {why_unsaved}; " if why_unsaved else ""
        )
        return StalledError(
            f"{self._summary()}; {self._view.folder() / STALL_REPORT} says who waited "
            f"for whom; {saved}{last if saved else f'checkpoint: {last}'}"
        )

    def react(self) -> None:
        """Tell the watchdog that the run ends now."""
        self._has_reacted = True

    def _summary(self) -> str:
        return (
            f"the run made no progress for {self._limit_s:g} s "
            f"(fault_tolerance.stall_limit_s) {self.where}"
        )

    # --- in the watchdog's thread -----------------------------------------------------

    def _end(self) -> None:
        self.where = self._view.where()
        self._report()
        watch = self._watch
        assert watch is not None
        limit_s = watch.limit_s or 0.0
        again_s = min(_AGAIN_S, limit_s)
        for _ in range(_NUM_SIGNALS):
            if self._has_reacted:
                break
            self._signals.interrupt(at_once=True)
            if watch.wait(again_s):
                return
        # A run that saves a checkpoint takes its time, so it gets the limit once more.
        if self._has_reacted and watch.wait(
            min(max(limit_s, _SHORTEST_END_S), _LONGEST_END_S)
        ):
            return
        self._kill()

    def _report(self) -> None:
        try:
            text = self._compose()
        except Exception as error:
            # The run must end, whatever keeps the report from being made.
            _logger.exception("the report of the stall failed")
            text = f"{self._summary()}\n(no report: {error!r})\n{thread_stacks()}\n"
        _logger.error("%s", text)
        with suppress(OSError):
            write_private_text(self._view.folder() / STALL_REPORT, text)

    def _compose(self) -> str:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        # Before anything else takes time, and without this thread.
        stacks = thread_stacks(leave_out=[threading.get_ident()])
        found = report_waits()
        driver = f"driver (pid {os.getpid()})"
        waits = [f"{driver}: {self.where}", *self._view.waits(), *found.workers]
        parts = [
            f"{self._summary()}, {now}",
            _block("Who waits for whom", waits),
            _block("Deadlines", found.calls or ["none"]),
            f"Stacks of the {driver}\n{stacks}",
            "\n".join(["Stacks of the workers", *(found.stacks or ["no workers"])]),
        ]
        return "\n\n".join(parts) + "\n"

    def _kill(self) -> None:
        """End the process without its help."""
        error = self.error(None, "the run did not react")
        with suppress(OSError):
            note_ending(self._view.folder(), error)
        with suppress(OSError):
            # Not by a logger: whatever hangs may hold its lock.
            os.write(2, f"Error: {error}; the process is killed\n".encode())
        kill_workers()
        # Not sys.exit, which only ends this thread and runs clean-up that may hang as
        # well.
        os._exit(_EXIT_CODE)


def _block(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])
