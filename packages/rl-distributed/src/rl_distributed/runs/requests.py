"""Requests to a run from other processes of its user, through the run's folder.

```
sender   ID.request.json --rename--> ID.taken.json             reader (the run)
         ID.answer.json  <------------------------ answer, when it has been seen to
```
Both sides write files atomically, in a folder that only their owner can read. The
reader holds a lock there, so that a sender notices at once if there is none. A sender
whose deadline has passed withdraws its request, unless it has been taken.

| part   | consumes | produces | waits for  | is unblocked by            |
|--------|----------|----------|------------|----------------------------|
| sender | answers  | requests | the answer | deadline, the reader's end |
| reader | requests | answers  | nothing    | -                          |

The reader looks between steps; when it closes, it answers the remaining requests.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_distributed.file_lock import FolderLock, is_locked
from rl_distributed.logs.logging import get_logger
from rl_distributed.private_files import create_private_folder, write_private_text
from rl_distributed.runs.ending import run_state

__all__ = ["REQUESTS", "RunRequest", "RunRequests", "default_sender", "send_request"]

_logger = get_logger(__name__)

REQUESTS = "requests"
"""Name of the folder, in that of the run."""
_REQUEST, _TAKEN, _ANSWER = ".request.json", ".taken.json", ".answer.json"
_LARGEST = 65_536
_LONGEST_NAME = 200
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


@dataclass(frozen=True)
class RunRequest:
    """A request to a run, which gets one answer."""

    kind: str
    """The kind of request, such as `update`."""
    body: Mapping[str, Any]
    """Its content."""
    by: str
    """The person or program that asked."""
    path: Path = field(repr=False)
    """The file, taken."""

    def answer(self, result: Mapping[str, Any]) -> None:
        """Answer with a result."""
        self._write({"ok": True, "result": dict(result)})

    def refuse(self, reason: str) -> None:
        """Answer with the reason for a refusal."""
        self._write({"ok": False, "reason": reason})

    def _write(self, answer: Mapping[str, Any]) -> None:
        name = self.path.name.removesuffix(_TAKEN)
        try:
            text = json.dumps(answer)
            write_private_text(self.path.with_name(name + _ANSWER), text)
        except OSError as error:
            # The run goes on; the sender waits to its deadline.
            _logger.warning("no answer to a request by %s: %s", self.by, error)
        self.path.unlink(missing_ok=True)


class RunRequests:
    """The reader's side: the one process that carries the run out.

    Args:
        run_dir: The folder of the run, which this process owns (`RunClaim`).

    Raises:
        LockHeldError: Another process reads them.
        OSError: The folder cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / REQUESTS
        create_private_folder(self._folder)
        self._lock = _lock_of(self._folder)
        if not is_locked(self._lock.path):
            # A note that a process on another machine has left would be waited for,
            # though the owner of the run knows already that it is gone.
            self._lock.path.unlink(missing_ok=True)
        self._lock.acquire()
        # Left over from an earlier reader, whose senders know that it is gone.
        for suffix in (_REQUEST, _TAKEN, _ANSWER):
            for path in self._folder.glob(f"*{suffix}"):
                path.unlink(missing_ok=True)

    def take(self) -> list[RunRequest]:
        """Return the requests that have come since the last call, the oldest first."""
        try:
            with os.scandir(self._folder) as entries:
                names = sorted(e.name for e in entries if e.name.endswith(_REQUEST))
        except OSError as error:
            _logger.warning("requests to the run cannot be read: %s", error)
            return []
        taken = (self._take(self._folder / name) for name in names)
        return [request for request in taken if request is not None]

    def _take(self, path: Path) -> RunRequest | None:
        target = path.with_name(path.name.removesuffix(_REQUEST) + _TAKEN)
        try:
            # The rename is atomic: either the reader takes the request or the sender
            # takes it back.
            path.rename(target)
            content = _read_own(target)
        except FileNotFoundError:
            return None  # its sender has taken it back
        # What nests too deep for the reader raises a RecursionError.
        except (OSError, ValueError, RecursionError) as error:
            _logger.warning("the request %s is ignored: %s", path.name, error)
            with contextlib.suppress(OSError):
                target.unlink()
            return None
        kind, body, by = (content.get(name) for name in ("kind", "body", "by"))
        request = RunRequest(str(kind), {}, _shown_name(by), target)
        if not isinstance(kind, str) or not isinstance(body, dict):
            request.refuse("a request needs a kind (text) and a body (a mapping)")
            return None
        return RunRequest(kind, body, request.by, target)

    def close(self) -> None:
        """Refuse the remaining requests and release the lock that senders look at."""
        # Answer before releasing the lock, because senders check the lock first.
        for request in self.take():
            request.refuse("the run has ended")
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def default_sender() -> str:
    """Return `user@machine`, the name of a sender that gives none."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no entry for the user, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def send_request(
    run_dir: str | os.PathLike[str],
    kind: str,
    body: Mapping[str, Any],
    *,
    by: str | None = None,
    deadline_s: float = 600.0,
) -> dict[str, Any]:
    """Ask something of a run that another process carries out; return its answer.

    Args:
        run_dir: The folder of the run; of one of several stages, the stage that runs
            is asked.
        kind: The kind of request.
        body: Its content, as JSON values.
        by: Name of the person or program, as recorded; None: `user@machine`.
        deadline_s: How long to wait for the answer; a run looks between its steps.

    Raises:
        ConfigError: No process carries the run out now, or not to the end; the run
            refuses, or the request cannot be sent.
        DeadlineExceededError: No answer came in time.
    """
    end = time.monotonic() + deadline_s
    run_dir = Path(run_dir)
    folder = _find_reader(run_dir)
    # The time orders requests; the random part keeps senders apart.
    name = f"{time.time_ns():020d}-{secrets.token_hex(8)}"
    request, answer = folder / (name + _REQUEST), folder / (name + _ANSWER)
    content = {"kind": kind, "body": dict(body), "by": by or default_sender()}
    _send(request, content)
    # Growing pauses: a run answers between steps, within milliseconds or minutes.
    pause_s = _SHORTEST_PAUSE_S
    while True:
        # Asked first: a reader answers before it lets go.
        is_read = _is_read(folder)
        if answer.exists():
            return _received(answer)
        if not is_read:
            request.unlink(missing_ok=True)
            (folder / (name + _TAKEN)).unlink(missing_ok=True)
            raise _no_reader(run_dir)
        if time.monotonic() >= end:
            raise _late(request, answer, deadline_s)
        time.sleep(min(pause_s, max(end - time.monotonic(), 0.0)))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _lock_of(folder: Path) -> FolderLock:
    return FolderLock(folder, "reading the requests to the run", name="reader")


def _find_reader(run_dir: Path) -> Path:
    """Return the folder of requests that a process reads.

    Raises:
        ConfigError: There is none.
    """
    try:
        if not run_dir.is_dir():
            raise ConfigError(f"there is no run in {run_dir}: give the folder of a run")
        for place in (run_dir, *sorted(run_dir.glob("stages/*"))):
            folder = place / REQUESTS
            if not folder.is_dir():
                continue
            # Whoever may not look in would see no reader.
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(
                    errno.EACCES, os.strerror(errno.EACCES), str(folder)
                )
            if _is_read(folder):
                return folder
    except PermissionError as error:
        raise ConfigError(
            f"the run in {run_dir} cannot be asked: {error.filename or run_dir}: "
            f"{error.strerror}; only the owner of a run may ask something of it"
        ) from error
    raise _no_reader(run_dir)


def _is_read(folder: Path) -> bool:
    return _lock_of(folder).owner() is not None


def _no_reader(run_dir: Path) -> ConfigError:
    state = run_state(run_dir)
    if state in ("running", "paused"):
        return ConfigError(
            f"the run in {run_dir} answers no requests now: it is starting, between "
            "two stages, or ending; ask again in a moment"
        )
    remedy = (
        "it has reached its end, so there is nothing to control"
        if state == "finished"
        else "resume it first (--resume FOLDER, in Python resume=True)"
    )
    return ConfigError(
        f"no process carries out the run in {run_dir} now, as it is {state}: {remedy}"
    )


def _send(path: Path, content: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(content)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a request must consist of JSON values: {error}") from None
    if len(text.encode()) > _LARGEST:
        raise ConfigError(
            f"a request must have at most {_LARGEST} bytes: got {len(text.encode())}"
        )
    try:
        write_private_text(path, text)
    except OSError as error:
        raise ConfigError(
            f"the request cannot be written to {path.parent}: {error.strerror}; only "
            "the owner of a run may ask something of it"
        ) from error


def _late(request: Path, answer: Path, deadline_s: float) -> DeadlineExceededError:
    try:
        request.unlink()
        fate = "it was taken back, and has no effect"
    except FileNotFoundError:
        fate = "the run was seeing to it and may still do it: look at its log"
    answer.unlink(missing_ok=True)
    return DeadlineExceededError(
        f"the run did not answer within {deadline_s:g} s ({fate}); it looks between "
        "its steps: give a deadline_s that is longer than one"
    )


def _received(answer: Path) -> dict[str, Any]:
    content = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink(missing_ok=True)
    if not content["ok"]:
        raise ConfigError(str(content["reason"]))
    result: dict[str, Any] = content["result"]
    return result


def _read_own(path: Path) -> dict[str, Any]:
    """Read a file of this process's user, and no other one.

    Raises:
        ValueError: It is another one's, no plain file, too large, or no JSON mapping.
    """
    # Following a link could make the run read any file of its owner.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        # Checked on the open file, because its name may lead elsewhere by now.
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.getuid(), 0):
            raise ValueError("it is no file of the run's owner")
        # Bounded, however large the file claims to be.
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes")
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON mapping")
    return content


def _shown_name(by: Any) -> str:
    """One line of a sender's name, whatever it was given."""
    text = "".join(c if c.isprintable() else " " for c in str(by or "unknown"))
    return text[:_LONGEST_NAME]
