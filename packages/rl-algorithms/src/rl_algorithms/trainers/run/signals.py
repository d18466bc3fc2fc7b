"""`SignalGuard`: stops a run on a signal without losing its progress.

```
signal --> SignalGuard --(abortable phase)--> raises Interrupted at once
                       --(protected phase)--> remembers; check() raises at its end
second signal, or one of the watchdog ------> raises Interrupted at once, always
second SIGHUP ------------------------------> nothing
```

| part            | consumes      | produces    | waits for | is unblocked by  |
|-----------------|---------------|-------------|-----------|------------------|
| handler         | the signal    | Interrupted | nothing   | -                |
| protected phase | -             | -           | its work  | a second signal  |

A phase is protected while the weights or the files of the run change: between its start
and its end there is no consistent state to save. The start of a run is protected as
well, because neither an import nor the start of Ray survives an exception in the
middle; it checks for signals between its parts and while it waits. Everything else
(rollouts, validation) may be abandoned, because the run is then still in the state that
the last step left.

An exception raised by a handler can get lost: the interrupted code may be a finalizer,
or an import under a bare `except`. A signal therefore stays pending until it is
acknowledged, and `check()` raises it again. Guards may be nested: a signal that reaches
the inner one too late is passed on to the outer one.

SIGHUP means that the terminal is gone. The kernel sends it to the foreground process
group and to the shell, and the shell sends it once more to its jobs. A second SIGHUP is
therefore no request to stop at once, and SIGHUP is ignored if the program was started
to outlive its terminal (`nohup`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupted", "SignalGuard"]

_NOTICE = b"\nStopping at the next safe point; a second signal stops at once.\n"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal ended the run; its progress is in `checkpoint_path`.

    It is a KeyboardInterrupt, so that no `except Exception` on the way swallows it.
    """

    def __init__(self, signum: int, checkpoint_path: str | None = None) -> None:
        super().__init__(signum, checkpoint_path)
        self.signum = signum
        """Number of the signal."""
        self.checkpoint_path = Path(checkpoint_path) if checkpoint_path else None
        """The checkpoint to resume from, or None if there was nothing to save."""

    @property
    def exit_code(self) -> int:
        """Exit code by the convention of shells for this signal: 130, 143, ..."""
        return 128 + self.signum

    def with_checkpoint(self, path: Path | None) -> Interrupted:
        """Return the same interruption with the saved checkpoint."""
        return Interrupted(self.signum, str(path) if path else None)

    def __str__(self) -> str:
        name = signal.Signals(self.signum).name
        if self.checkpoint_path is None:
            return f"interrupted by {name} before anything could be saved"
        return f"interrupted by {name}; the run is saved in {self.checkpoint_path}"


class SignalGuard:
    """Turns SIGINT, SIGTERM, SIGUSR1 and SIGHUP into `Interrupted` while it is entered.

    Python allows signal handlers in the main thread only; in any other thread the guard
    reacts to nothing but `request()`.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._protected = False
        self._closing = False
        self._hung_up = self._at_once = False
        self.pending: int | None = None
        """Number of the pending signal, or None."""

    def __enter__(self) -> SignalGuard:
        self.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            if self.pending is not None and kind is None and self._previous:
                # Too late for this run, but the outer guard or the program may want it.
                signal.raise_signal(self.pending)
        self._previous = {}

    def install(self) -> None:
        """Set the handlers; to be repeated after a library (Ray) has set its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup
            previous = signal.signal(number, self._handle)
            # Only the first call finds the program's own handler, which `__exit__`
            # restores.
            self._previous.setdefault(number, previous)

    def request(self, signum: int = signal.SIGINT) -> None:
        """Request an interruption at the next `check()`, from any thread."""
        self.pending = int(signum)

    def interrupt(self, *, at_once: bool = False) -> None:
        """Interrupt the run as a first SIGTERM would, from any thread.

        Args:
            at_once: Interrupt a protected phase too, as a second signal would: it is
                known not to end by itself.
        """
        # A second signal would count as a person's demand to stop at once.
        if self._closing or (self.pending is not None and not at_once):
            return
        self._at_once = at_once
        if self._previous:
            # A real signal, because it also wakes the main thread from a wait.
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.request(signal.SIGTERM)

    def acknowledge(self) -> None:
        """Mark the pending signal as handled, so that it is not raised again."""
        self.pending, self._at_once = None, False

    def close(self) -> None:
        """Begin the shutdown, during which only a second signal raises."""
        self._closing = True
        self.pending, self._at_once = None, False

    def check(self) -> None:
        """Raise Interrupted if a signal is pending and no phase is protected.

        Raises:
            Interrupted: A signal came.
        """
        if self._at_once or not (self._protected or self._closing):
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raise Interrupted if a signal is pending, even within a protected phase.

        Raises:
            Interrupted: A signal came.
        """
        if self.pending is not None:
            raise Interrupted(self.pending)

    def hold(self) -> None:
        """Begin a protected phase: signals take effect only at its end."""
        self._protected = True

    def release(self) -> None:
        """End the protected phase.

        Raises:
            Interrupted: A signal came meanwhile.
        """
        self._protected = False
        self.check()

    @property
    def held(self) -> bool:
        """Whether a phase is protected."""
        return self._protected

    @contextmanager
    def protected(self) -> Iterator[None]:
        """Protect a block: signals take effect only at its end.

        Raises:
            Interrupted: A signal came meanwhile.
        """
        # Restored afterwards, as protected blocks may be nested.
        held, self._protected = self._protected, True
        try:
            yield
        finally:
            self._protected = held
        self.check()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        first = self.pending is None
        if signum == signal.SIGHUP:
            if self._hung_up or not first:
                return
            self._hung_up = True
        self.pending = signum
        if first and (self._protected or self._closing) and not self._at_once:
            # Neither print nor logging is safe in a signal handler. After a SIGHUP
            # there is no terminal to write to, hence the OSError.
            with suppress(OSError):
                os.write(2, _NOTICE)
            return
        raise Interrupted(signum)
