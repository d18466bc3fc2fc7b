"""An audit log: who did what to clusters, workers and checkpoints, and how it ended.

Off until `enable_audit` is called or `RL_AUDIT_LOG` names a file; `audit` costs one
comparison then. One JSON object per line is appended under a file lock, so processes of
one machine may share a file; each line holds the digest of the line before it, so that
a line which is changed or taken out shows. Secrets are hidden before anything is
written.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_distributed.errors import AuditError, DeadlineExceededError
from rl_distributed.logging import current_log_context
from rl_distributed.redaction import redacted

__all__ = [
    "AUDIT_VARIABLE",
    "AuditLog",
    "AuditSummary",
    "audit",
    "audited",
    "disable_audit",
    "enable_audit",
    "verify_audit_log",
]

logger = logging.getLogger(__name__)

AUDIT_VARIABLE = "RL_AUDIT_LOG"
"""Names the file of the audit log for processes that do not call `enable_audit`."""

_NO_LINE = "0" * 64
_LONGEST_LINE = 65_536


@dataclass(frozen=True, slots=True)
class AuditSummary:
    """What a whole audit log holds."""

    num_entries: int
    last_digest: str
    """SHA-256 of the last line. Kept elsewhere and given to `verify_audit_log`, it also
    proves that no line was taken from the end."""


class AuditLog:
    """One file that entries are appended to.

    Args:
        path: the file; it is made with mode 0600, and its folder if need be.
        chain: whether each line holds the digest of the one before.
        sync: whether each line is on the disk before the action goes on.
        deadline_s: how long to wait for another process that writes.

    Raises:
        AuditError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        chain: bool = True,
        sync: bool = False,
        deadline_s: float = 5.0,
    ) -> None:
        self.path = Path(path).resolve()
        self._chain = chain
        self._sync = sync
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._opened():
                pass
        except OSError as error:
            raise AuditError(
                f"audit log {self.path} cannot be written: {error}; choose another "
                f"path in enable_audit or {AUDIT_VARIABLE}"
            ) from error

    def append(self, entry: dict[str, Any]) -> None:
        """Write one entry as one line.

        Raises:
            AuditError: the file cannot be written.
            DeadlineExceededError: another process holds the file.
        """
        try:
            with self._lock, self._opened() as file, self._locked(file):
                last, is_whole = _last_line(file)
                if self._chain:
                    entry = {**entry, "previous": _digest(last)}
                line = json.dumps(entry, default=str, ensure_ascii=False)
                data = (b"" if is_whole else b"\n") + line.encode() + b"\n"
                written = os.write(file, data)
                if written < len(data):
                    raise OSError("the disk is full")
                if self._sync:
                    os.fsync(file)
        except OSError as error:
            if isinstance(error, DeadlineExceededError):
                raise
            raise AuditError(
                f"audit log {self.path} cannot be written: {error}"
            ) from error

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        # Opened for every entry: the file may be rotated away while the program runs.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self.path, flags, stat.S_IRUSR | stat.S_IWUSR)
        try:
            yield file
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _locked(self, file: int) -> Iterator[None]:
        end = time.monotonic() + self._deadline_s
        pause = threading.Event()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineExceededError(
                        f"audit log {self.path} was held by another process for "
                        f"{self._deadline_s:g} s"
                    ) from None
                pause.wait(0.005)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _digest(line: bytes | None) -> str:
    return _NO_LINE if line is None else hashlib.sha256(line).hexdigest()


def _last_line(file: int) -> tuple[bytes | None, bool]:
    """The last line of a file, and whether its newline is there."""
    size = os.fstat(file).st_size
    if size == 0:
        return None, True
    length = _LONGEST_LINE
    while True:
        start = max(0, size - length)
        tail = os.pread(file, size - start, start)
        is_whole = tail.endswith(b"\n")
        body = tail[:-1] if is_whole else tail
        if b"\n" in body or start == 0:
            return body.rpartition(b"\n")[2], is_whole
        length *= 2


# None: off. The environment is read once, at the first action.
_log: AuditLog | None = None
_is_decided = False


def enable_audit(
    path: str | os.PathLike[str],
    *,
    chain: bool = True,
    sync: bool = False,
    deadline_s: float = 5.0,
) -> None:
    """Write the actions of this process to an audit log from now on.

    Args:
        path: the file; it is made with mode 0600.
        chain: whether each line holds the digest of the one before.
        sync: whether each line is on the disk before the action goes on.
        deadline_s: how long to wait for another process that writes.

    Raises:
        AuditError: the file cannot be written.
    """
    global _log, _is_decided
    _log = AuditLog(path, chain=chain, sync=sync, deadline_s=deadline_s)
    _is_decided = True


def disable_audit() -> None:
    """Write no more; `RL_AUDIT_LOG` is not looked at again."""
    global _log, _is_decided
    _log, _is_decided = None, True


def audit(action: str, object: str = "", outcome: str = "ok", **fields: Any) -> None:
    """Note one action, if the audit log is on.

    Args:
        action: what was done: `cluster.start`, `group.up`, `checkpoint.saved`.
        object: to what: an address, the name of a group, a folder.
        outcome: `ok`, `failed` or `refused`.
        fields: what else is to be known. Secrets among them are hidden.

    A log that cannot be written is reported as an error in the ordinary log; the action
    goes on.
    """
    if _log is None and (_is_decided or not _decide_by_environment()):
        return
    if _log is None:
        return
    try:
        _log.append(_entry(action, object, outcome, fields))
    except (AuditError, DeadlineExceededError, TypeError, ValueError):
        logger.exception("the action %s is missing from the audit log", action)


@contextlib.contextmanager
def audited(action: str, object: str = "", **fields: Any) -> Iterator[None]:
    """Note the action of a block when it ends: `ok`, or `failed` with the error."""
    try:
        yield
    except BaseException as error:
        shown = f"{type(error).__name__}: {error}"
        audit(action, object, "failed", error=shown, **fields)
        raise
    audit(action, object, **fields)


def _decide_by_environment() -> bool:
    global _is_decided
    _is_decided = True
    path = os.environ.get(AUDIT_VARIABLE, "")
    if path:
        enable_audit(path)
    return bool(path)


def _entry(
    action: str, object: str, outcome: str, fields: dict[str, Any]
) -> dict[str, Any]:
    context = {
        key: value for key, value in current_log_context().items() if key not in fields
    }
    entry = {
        "time": datetime.now(UTC).isoformat(),
        "user": _user(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "action": action,
        "object": object,
        "outcome": outcome,
    }
    cleaned: dict[str, Any] = redacted({**context, **fields, **entry})
    # The fixed fields come first, whatever else there is.
    return {name: cleaned.pop(name) for name in entry} | cleaned


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def verify_audit_log(
    path: str | os.PathLike[str], *, last_digest: str | None = None
) -> AuditSummary:
    """Check that an audit log with a chain is whole.

    Args:
        path: the file.
        last_digest: `AuditSummary.last_digest` from earlier; the line that it belongs
            to must still be there. Without it, lines taken from the end do not show.

    Raises:
        AuditError: a line is missing, was changed, or is not whole; the message names
            the first such line.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise AuditError(f"audit log {path} cannot be read: {error}") from error
    lines = data.split(b"\n")
    if lines[-1]:
        raise AuditError(f"audit log {path}, line {len(lines)} is not whole")
    previous: bytes | None = None
    seen = {_NO_LINE}
    for number, line in enumerate(lines[:-1], start=1):
        _check_line(path, number, line, previous)
        previous = line
        seen.add(_digest(line))
    if last_digest is not None and last_digest not in seen:
        raise AuditError(
            f"audit log {path}: the line with digest {last_digest[:12]}... is gone; "
            "lines were taken from the end"
        )
    return AuditSummary(len(lines) - 1, _digest(previous))


def _check_line(
    path: str | os.PathLike[str], number: int, line: bytes, previous: bytes | None
) -> None:
    try:
        entry = json.loads(line)
        found = entry["previous"]
    except (ValueError, KeyError, TypeError):
        raise AuditError(
            f"audit log {path}, line {number} is no entry with a chain: {line[:80]!r}"
        ) from None
    if found != _digest(previous):
        raise AuditError(
            f"audit log {path}, line {number}: the line before it was changed or taken "
            "out"
        )
