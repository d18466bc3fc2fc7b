"""Detect that a process of vLLM's engine has ended or is stopped.

And the other way round: have such a process end together with its parent.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rl_distributed.logs.logging import get_logger

__all__ = ["ProcessWatch", "end_process", "end_with_parent", "parent_variables"]

_logger = get_logger(__name__)

_LOOK_S = 1.0
# A process that is stopped for a moment, as under a debugger, may go on.
_STOPPED_S = 4.0
# EX_SOFTWARE of sysexits.h: an internal software error.
_EXIT_CODE = 70
_PARENT = "RL_ENGINE_OF"
_PR_SET_PDEATHSIG = 1


def parent_variables() -> dict[str, str]:
    """Return variables that `end_with_parent` needs, set before an engine is built."""
    return {_PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends.

    It does nothing outside an engine's own process.
    """
    # The variable is inherited by everything that a worker starts; only its direct
    # children are engines.
    if os.environ.get(_PARENT) == str(os.getppid()):
        # A parent that is killed cannot clean up, and the engine would keep its GPU.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_process(problem: str) -> None:
    """End this process at once, because nothing can continue in it."""
    _logger.critical("%s, and so this process ends", problem)
    # Without clean-up, which could wait for the very process that is lost.
    os._exit(_EXIT_CODE)


class ProcessWatch:
    """Watches processes from a thread, until one fails or the watch is closed.

    Args:
        processes: Process ids on this machine.
        on_loss: Called with the problem, in the thread or by `check`. A stopped process
            has been killed by then.

    Raises:
        ProcessLookupError: One of them is gone already.
    """

    def __init__(
        self, processes: Sequence[int], on_loss: Callable[[str], None]
    ) -> None:
        self._on_loss = on_loss
        # A process id can be reused after a process has ended; a handle cannot.
        self._handles = {os.pidfd_open(number): number for number in processes}
        # `close` writes to the pipe, which ends the wait of the thread.
        self._wake_out, self._wake_in = os.pipe()
        # A daemon: a watch that was not closed must not keep the process alive.
        self._thread = threading.Thread(
            target=self._run, name="engine-watch", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Look now: a call may fail before the thread has noticed the lost process."""
        self._look(0.0)

    def close(self) -> None:
        """End the thread; the processes may end from now on."""
        # The handles are closed last: the thread polls them until it ends.
        os.write(self._wake_in, b".")
        self._thread.join()
        for handle in (*self._handles, self._wake_in, self._wake_out):
            os.close(handle)

    def _run(self) -> None:
        stopped_s = 0.0
        while self._look(_LOOK_S):
            stopped = [n for n in self._handles.values() if _is_stopped(n)]
            stopped_s = stopped_s + _LOOK_S if stopped else 0.0
            if stopped_s >= _STOPPED_S:
                with suppress(ProcessLookupError):
                    # It may hold memory of the GPU that the next engine needs.
                    os.kill(stopped[0], signal.SIGKILL)
                self._on_loss(
                    f"process {stopped[0]} of vLLM's engine stood still (SIGSTOP) for "
                    f"{stopped_s:.0f} s"
                )
                return

    def _look(self, timeout_s: float) -> bool:
        """Wait for a process to end; return whether to go on watching."""
        # `select.select` fails for file descriptors above 1023, which a worker with
        # many open files has.
        poll = select.poll()
        for watched in (self._wake_out, *self._handles):
            poll.register(watched, select.POLLIN)
        ready = [handle for handle, _ in poll.poll(timeout_s * 1000.0)]
        if self._wake_out in ready:
            return False
        if ready:
            number = self._handles[ready[0]]
            self._on_loss(f"process {number} of vLLM's engine has ended")
        return not ready


def _is_stopped(number: int) -> bool:
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False  # it has ended, which `_look` reports
    # The program's name stands before it in parentheses, and may hold any character.
    return status.rpartition(")")[2].split()[0] == "T"
