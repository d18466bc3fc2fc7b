"""`rl train --supervise N`: a run in a child process that is restarted when it dies.

```
start --> child: rl train ... --exit: 0, 2, or stopped by a signal--> its exit code
  ^                   |
  |                  died (killed, or exit code 1)
  +--- pause <--- fewer than N times without new progress, and not three times with one
                  error in one step; else the child's exit code
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| supervisor | signals, the child's end | children | child, pause | its end, a signal |
| child | forwarded signals | checkpoints | its work | a signal |

The child has a process group of its own, so that a signal reaches it only once, through
the supervisor: to a run, a second signal means to exit immediately.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rl_cli.recipe_files import recipe_path
from rl_cli.run_folder import RESTARTS, RunFolder
from rl_cli.run_place import find_place, given_output_dir
from rl_distributed.config import load_config
from rl_distributed.config.hidden_keys import hide_secrets
from rl_distributed.errors import ConfigError
from rl_distributed.private_files import create_private_folder, private_opener
from rl_distributed.runs.ending import read_ending
from rl_distributed.runs.folder import has_progress, kept_progress, new_run_folder

__all__ = ["SupervisedRun", "supervise"]

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_DONE, _USER_ERROR, _SIGNALLED = 0, 2, 128
_MOST_ALIKE = 3
"""Number of failures with one error in one step after which a restart is no use."""


class SupervisedRun:
    """A supervised run: its folder and the command of its next start.

    Args:
        name: Recipe or algorithm.
        config: YAML file of an algorithm.
        overrides: Overrides of keys.
        resume: As for `rl train --resume`.
        overwrite: Allow a new run to delete the one in its folder.
        flags: Options of every start.

    Raises:
        UserError: The folder cannot be used, see `find_place`, or contains a run other
            than the requested one.
    """

    def __init__(
        self,
        name: str,
        config: Path | None,
        overrides: Sequence[str],
        *,
        resume: str | None,
        overwrite: bool,
        flags: Sequence[str],
    ) -> None:
        self._name, self._config, self._overrides = name, config, list(overrides)
        self._overwrite, self._flags = overwrite, list(flags)
        # Wall time, as it is compared with the times of files.
        self._began_ns = time.time_ns()
        self._resumes = self._has_made_folder = False
        if resume is not None:
            found = find_place(name, config, overrides, resume)
            assert found is not None
            # Release it, as the child must own it.
            found.__exit__(None, None, None)
            self.folder = found.path
            self._resumes = True
            return
        given = _given_folder(name, config, overrides)
        if given is not None and not overwrite and has_progress(given):
            _check_same_run(name, config, overrides, given)
            self._resumes = True
        else:
            find_place(name, config, overrides, None, overwrite=overwrite)
        if given is None:
            Path("runs").mkdir(exist_ok=True)
            given = new_run_folder(Path("runs"), Path(name).stem)
            self._has_made_folder = True
            # Named for the child: a generated name would be another one after each
            # restart.
            self._overrides.append(f"output_dir={given}")
        self.folder = given.resolve()

    def __enter__(self) -> SupervisedRun:
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the folder if no run has started in it."""
        if self._has_made_folder:
            # It is kept if there is anything in it.
            with suppress(OSError):
                self.folder.rmdir()

    def command(self) -> list[str]:
        """Return the command of the next start, of a new run or to resume this one."""
        start = [sys.executable, "-m", "rl_cli", "train", self._name]
        if self._resumes or (self._has_begun() and has_progress(self.folder)):
            self._resumes = True
            hidden = RunFolder(self.folder).read("run.json").get("hidden", [])
            # They are not stored in run.json, so each start needs them again.
            secrets = [o for o in self._overrides if o.partition("=")[0] in hidden]
            return [*start, *secrets, "--resume", str(self.folder), *self._flags]
        config = [] if self._config is None else ["--config", str(self._config)]
        # Once only: a second start with it would delete what the first has saved.
        again = ["--overwrite"] if self._overwrite and not self._has_begun() else []
        return [*start, *self._overrides, *config, *again, *self._flags]

    def _has_begun(self) -> bool:
        """Return True if this supervisor's run has written its record."""
        try:
            return (self.folder / "run.json").stat().st_mtime_ns >= self._began_ns
        except FileNotFoundError:
            return False

    def progress(self) -> frozenset[str]:
        """Return the progress saved by the run so far."""
        return kept_progress(self.folder)

    def cause(self) -> str | None:
        """Return the error that ended the last child, and its step; None if unknown.

        Errors outside of steps count as unknown: during set-up many are temporary.
        """
        ending = read_ending(self.folder)
        if ending is None or ending.state != "failed":
            return None
        places = [note for note in ending.notes if note.startswith("in step ")]
        return f"{places[0]}: {ending.reason}" if places else None

    def record(self, event: dict[str, Any]) -> None:
        """Append a line to `logs/restarts.jsonl` of the run."""
        create_private_folder(self.folder / "logs")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with open(self.folder / RESTARTS, "a", opener=private_opener) as file:
            file.write(json.dumps({"time": now, **event}) + "\n")


def supervise(run: SupervisedRun, tries: int, say: Callable[[str], None]) -> int:
    """Carry out a run, restarting it when it dies.

    Args:
        run: The run.
        tries: Maximum number of consecutive restarts without new progress.
        say: Function that shows a message to the user.

    Returns:
        The exit code of the last child; 128 + signal if a signal killed it.
    """
    failures = _Failures(tries)
    with run, _forwarding() as stop:
        while True:
            # Read before each start: only what this child saves resets the count.
            before = run.progress()
            code = stop.run(run.command())
            # A wrong configuration fails again, and a forwarded signal means that the
            # end is wanted.
            if code in (_DONE, _USER_ERROR) or stop.signum is not None:
                return _shell_code(code)
            # The child reports a signal that reached it directly: somebody stopped it
            # on purpose.
            if code > _SIGNALLED:
                return code
            # A killed child leaves no note; an older one says nothing about it.
            cause = run.cause() if code > 0 else None
            failures.add(cause, is_further=run.progress() != before)
            how, failed = _how_it_ended(code), failures.in_a_row
            if (final := failures.why_final()) is not None:
                say(f"The run {how}, {final}; giving up.")
                return _shell_code(code)
            pause_s = min(_FIRST_PAUSE_S * 2 ** (failed - 1), _LONGEST_PAUSE_S)
            say(
                f"The run {how}; restarting it in {pause_s:g} s (restart {failed} of "
                f"{tries} without new progress)."
            )
            known = {} if cause is None else {"cause": cause}
            run.record({"ended": how, "restart": failed, **known})
            if stop.pause(pause_s):
                return _SIGNALLED + (stop.signum or 0)


class _Failures:
    """The failures of a run since its last progress."""

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._alike = 0
        self._cause: str | None = None
        self.in_a_row = 0

    def add(self, cause: str | None, *, is_further: bool) -> None:
        """Count a failure.

        Args:
            cause: Error and step, if known.
            is_further: Whether the child made progress before it.
        """
        self.in_a_row = 1 if is_further else self.in_a_row + 1
        is_alike = cause is not None and cause == self._cause and not is_further
        self._alike = self._alike + 1 if is_alike else 1
        self._cause = cause

    def why_final(self) -> str | None:
        """Return why no restart follows; None if one does."""
        if self._cause is not None and self._alike >= _MOST_ALIKE:
            return f"{self._alike} times with the same error ({self._cause})"
        if self.in_a_row > self._tries:
            return f"{self.in_a_row} times without new progress"
        return None


class _Child:
    """The running process, and the signal that stops it."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str]) -> int:
        """Start a process and wait for its end, forwarding signals.

        Returns:
            Its exit code; 128 + signal, without a start, if a signal has come before.
        """
        # A signal between the start and the assignment would find no child.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            if self.signum is not None:
                # It came between two children, and none has heard it.
                return _SIGNALLED + self.signum
            self._process = subprocess.Popen(
                command,
                process_group=0,
                # The child inherits the mask, but must receive signals.
                preexec_fn=_hear,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        return self._process.wait()

    def pause(self, seconds: float) -> bool:
        """Wait, and return True if a signal arrived."""
        # An event, not a sleep, which a signal's handler would not cut short.
        return self._stop.wait(seconds)

    def forward(self, signum: int, _: FrameType | None) -> None:
        self.signum = signum
        self._stop.set()
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signum)


def _hear() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


@contextmanager
def _forwarding() -> Iterator[_Child]:
    child = _Child()
    before = {
        signum: signal.signal(signum, child.forward)
        for signum in _STOPS
        # Signals ignored from outside (nohup, background jobs) must stay ignored.
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield child
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _shell_code(code: int) -> int:
    return _SIGNALLED - code if code < 0 else code


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def _given_folder(
    name: str, config: Path | None, overrides: Sequence[str]
) -> Path | None:
    path = recipe_path(name) or config
    data = load_config(path) if path is not None else {}
    given = given_output_dir(data, overrides)
    return None if given is None else Path(given)


def _check_same_run(
    name: str, config: Path | None, overrides: Sequence[str], folder: Path
) -> None:
    """Check that a folder contains the requested run.

    Raises:
        ConfigError: Its configuration differs.
    """
    from rl_cli.run_config import load_run  # noqa: PLC0415 - loads the algorithms

    run = load_run(name, config, overrides)
    # Through JSON, like what is stored: tuples become lists.
    asked = json.loads(json.dumps(hide_secrets(run.source["config"])[0]))
    held = RunFolder(folder).read("run.json")
    if held["name"] != run.source["name"] or held["config"] != asked:
        raise ConfigError(
            f"output_dir {str(folder)!r} contains a run with another configuration, "
            f"which cannot be continued: resume that one (--resume {folder}), delete "
            "it (--overwrite), or name another folder"
        )
