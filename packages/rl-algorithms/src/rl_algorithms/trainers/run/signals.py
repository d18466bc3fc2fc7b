"""Stopping a run by a signal without losing it.

```
signal --> SignalGuard --(abortable phase)--> raises Interrupted at once
                       --(protected phase)--> remembers; check() raises at its end
second signal ------------------------------> raises Interrupted at once, always
second SIGHUP ------------------------------> nothing
```

| part            | consumes      | produces    | waits for | is unblocked by  |
|-----------------|---------------|-------------|-----------|------------------|
| handler         | the signal    | Interrupted | nothing   | -                |
| protected phase | -             | -           | its work  | a second signal  |

A phase is protected while the weights or the files of the run are being changed:
between its begin and its end there is no state that could be saved. So is the start,
because neither an import nor the start of Ray survives an exception in its middle; it
asks between its parts, and while it waits. Everything else (rollouts, validation) may
be abandoned, because the run then still is in the state that the last step left.

An exception that a handler raises can get lost: the interrupted code may be a
finalizer, or an import under a bare `except`. So a signal stays pending until somebody
acknowledges it, and `check()` raises it again. Guards may be nested; what reaches the
inner one too late is passed on to the outer one.

SIGHUP says that the terminal is gone. Nobody sends it: the kernel does, to the process
group in the foreground and to the shell, and the shell once more to its jobs. So a
further one is nobody's wish to leave at once, and none is taken where the program was
started to outlive its terminal (`nohup`).
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
    """A signal ended the run; what it had reached is in `checkpoint_path`.

    It is a KeyboardInterrupt, so that no `except Exception` on the way swallows it.
    """

    def __init__(self, signum: int, checkpoint_path: str | None = None) -> None:
        super().__init__(signum, checkpoint_path)
        self.signum = signum
        """Number of the signal."""
        self.checkpoint_path = Path(checkpoint_path) if checkpoint_path else None
        """The checkpoint to resume from, or None when there was nothing to save."""

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that this signal ended: 130, 143, ..."""
        return 128 + self.signum

    def with_checkpoint(self, path: Path | None) -> Interrupted:
        """Return the same interruption with the checkpoint that was kept."""
        return Interrupted(self.signum, str(path) if path else None)

    def __str__(self) -> str:
        name = signal.Signals(self.signum).name
        if self.checkpoint_path is None:
            return f"interrupted by {name} before anything could be saved"
        return f"interrupted by {name}; the run is saved in {self.checkpoint_path}"


class SignalGuard:
    """Turns SIGINT, SIGTERM, SIGUSR1 and SIGHUP into `Interrupted` while it is entered.

    In another thread than the main one Python allows no handlers; the guard then does
    nothing but answer to `request()`.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._protected = False
        self._closing = False
        self._hung_up = False
        self.pending: int | None = None
        """Number of the signal that came and has not been acknowledged."""

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
                signal.raise_signal(self.pending)
        self._previous = {}

    def install(self) -> None:
        """Set the handlers; again after a library (Ray) has set its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup
            previous = signal.signal(number, self._handle)
            self._previous.setdefault(number, previous)

    def request(self, signum: int = signal.SIGINT) -> None:
        """Ask for an interruption at the next `check()`, from any thread."""
        self.pending = int(signum)

    def interrupt(self) -> None:
        """Interrupt the run as a first SIGTERM would, from any thread."""
        if self._closing or self.pending is not None:
            return
        if self._previous:
            # To the main thread, which may be waiting for something.
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.request(signal.SIGTERM)

    def acknowledge(self) -> None:
        """Say that the signal was dealt with: it is not raised again."""
        self.pending = None

    def close(self) -> None:
        """Begin the shutdown: a signal is only remembered until a second one comes."""
        self._closing = True
        self.pending = None

    def check(self) -> None:
        """Raise Interrupted when a signal came that nobody acknowledged.

        Raises:
            Interrupted: A signal came.
        """
        if not self._protected and not self._closing:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Do the same in a protected stretch, at a point that is safe.

        Raises:
            Interrupted: A signal came.
        """
        if self.pending is not None:
            raise Interrupted(self.pending)

    def hold(self) -> None:
        """Begin a stretch that must come to its end before a signal takes effect."""
        self._protected = True

    def release(self) -> None:
        """End that stretch.

        Raises:
            Interrupted: A signal came meanwhile.
        """
        self._protected = False
        self.check()

    @property
    def held(self) -> bool:
        """Whether such a stretch is open."""
        return self._protected

    @contextmanager
    def protected(self) -> Iterator[None]:
        """Let a block come to its end before a signal takes effect.

        Raises:
            Interrupted: A signal came meanwhile.
        """
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
        if first and (self._protected or self._closing):
            # Neither print nor logging may be used in a signal handler; and after a
            # SIGHUP there is no terminal to write to.
            with suppress(OSError):
                os.write(2, _NOTICE)
            return
        raise Interrupted(signum)
