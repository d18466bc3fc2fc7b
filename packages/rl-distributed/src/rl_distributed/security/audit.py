"""An audit log of actions on clusters, workers and checkpoints, and their outcomes.

Off until `enable_audit` is called or `RL_AUDIT_LOG` names a file; `audit` costs one
comparison then. One JSON object per line is appended under a file lock, so processes of
one machine may share a file; each line holds the digest of the line before it, so that
a line which is changed or taken out shows. With a key each line also holds a code over
itself (HMAC-SHA256), which cannot be made without the key:

```
{"time": ..., "previous": SHA-256 of the line before, "hmac": code of this line so far}
```
Secrets are hidden before anything is written.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import socket
import stat
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_distributed.errors import AuditError, ConfigError, LockHeldError
from rl_distributed.file_lock import FileLock
from rl_distributed.logs.logging import current_log_context
from rl_distributed.redaction import redacted
from rl_distributed.security.audit_chain import code_of, digest_of, read_key

__all__ = [
    "AUDIT_KEY_VARIABLE",
    "AUDIT_VARIABLE",
    "AuditLog",
    "audit",
    "audit_path",
    "audited",
    "disable_audit",
    "enable_audit",
]

logger = logging.getLogger(__name__)

AUDIT_VARIABLE = "RL_AUDIT_LOG"
"""Names the file of the audit log for processes that do not call `enable_audit`."""

AUDIT_KEY_VARIABLE = "RL_AUDIT_KEY_FILE"
"""Names the file of its key for those processes."""

_LONGEST_LINE = 65_536


class AuditLog:
    """One file that entries are appended to.

    Args:
        path: the file; it is made with mode 0600, and its folder if need be.
        chain: whether each line holds the digest of the one before.
        key_file: file of `create_audit_key`; each line gets a code by it.
        sync: whether each line is on the disk before the action goes on.
        deadline_s: how long to wait for another process that writes.

    Raises:
        AuditError: the file cannot be written, or the key cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        chain: bool = True,
        key_file: str | os.PathLike[str] | None = None,
        sync: bool = False,
        deadline_s: float = 5.0,
    ) -> None:
        self.path = Path(path).resolve()
        if key_file is not None and not chain:
            raise ConfigError(
                "key_file needs the chain, or lines could be taken out unseen: got "
                "chain=False; leave one of the two out"
            )
        self._chain = chain
        self._key = None if key_file is None else read_key(Path(key_file))
        self._sync = sync
        self._deadline_s = deadline_s
        # The file lock excludes other processes; this one excludes other threads.
        self._lock = threading.Lock()
        # It opens the file for every entry: that may be rotated away meanwhile.
        self._file_lock = FileLock(
            self.path,
            "the audit log",
            remedy="end a process that is stopped while it holds it",
            mode=stat.S_IRUSR | stat.S_IWUSR,
            is_data=True,
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Now rather than at the first action, where the error would only be logged.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(self.path, flags, stat.S_IRUSR | stat.S_IWUSR))
        except OSError as error:
            raise AuditError(
                f"audit log {self.path} cannot be written: {error}; choose another "
                f"path in enable_audit or {AUDIT_VARIABLE}"
            ) from error

    def append(self, entry: dict[str, Any]) -> None:
        """Write one entry as one line.

        Raises:
            AuditError: the file cannot be written.
            LockHeldError: another process holds the file.
        """
        try:
            with self._lock, self._file_lock.held(self._deadline_s) as file:
                last, is_whole = _last_line(file)
                if self._chain:
                    entry = {**entry, "previous": digest_of(last)}
                text = json.dumps(entry, default=str, ensure_ascii=False)
                # The name of a file need not be UTF-8, and then holds surrogates; what
                # is written in their place is their form in JSON.
                line = text.encode("utf-8", "backslashreplace")
                if self._key is not None:
                    # Computed over the serialised line, so that
                    # verification need not re-serialise.
                    code = code_of(self._key, line)
                    line = line[:-1] + f', "hmac": "{code}"}}'.encode()
                # A killed writer may have left half a line, which stays
                # on a line of its own.
                data = (b"" if is_whole else b"\n") + line + b"\n"
                # A single write, so that a kill tears at most this line.
                written = os.write(file, data)
                if written < len(data):
                    raise OSError("the disk is full")
                if self._sync:
                    os.fsync(file)
        # A subclass of OSError whose message already names the holder of the file.
        except LockHeldError:
            raise
        except OSError as error:
            raise AuditError(
                f"audit log {self.path} cannot be written: {error}"
            ) from error


def _last_line(file: int) -> tuple[bytes | None, bool]:
    """Return the last line of a file, and whether its newline is there."""
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
        # The line is longer than the part read so far.
        length *= 2


# None: off. The environment is read once, at the first action.
_log: AuditLog | None = None
_is_decided = False


def enable_audit(
    path: str | os.PathLike[str],
    *,
    chain: bool = True,
    key_file: str | os.PathLike[str] | None = None,
    sync: bool = False,
    deadline_s: float = 5.0,
) -> None:
    """Write the actions of this process to an audit log from now on.

    Args:
        path: the file; it is created with mode 0600.
        chain: whether each line holds the digest of the one before.
        key_file: file of `create_audit_key`; each line gets a code, which cannot be
            computed without the key.
        sync: whether each line is on the disk before the action goes on.
        deadline_s: how long to wait for another process that writes.

    Raises:
        AuditError: the file cannot be written, or the key cannot be read.
        ConfigError: there is a key and no chain.
    """
    global _log, _is_decided
    _log = AuditLog(
        path, chain=chain, key_file=key_file, sync=sync, deadline_s=deadline_s
    )
    _is_decided = True


def disable_audit() -> None:
    """Write no more; `RL_AUDIT_LOG` is not looked at again."""
    global _log, _is_decided
    _log, _is_decided = None, True


def audit_path() -> Path | None:
    """Return the audit log that this process writes to, or None where it is off.

    Raises:
        AuditError: `RL_AUDIT_LOG` names a file that cannot be written.
    """
    if not _is_decided:
        _decide_by_environment()
    return None if _log is None else _log.path


def audit(action: str, object: str = "", outcome: str = "ok", **fields: Any) -> None:
    """Note one action, if the audit log is on.

    Args:
        action: name of the action: `cluster.start`, `group.up`, `checkpoint.saved`.
        object: its object: an address, the name of a group, a folder.
        outcome: `ok`, `failed` or `refused`.
        fields: further information. Secrets among it are hidden.

    A log that cannot be written is reported as an error in the ordinary log; the action
    goes on.
    """
    if _log is None and (_is_decided or not _decide_by_environment()):
        return
    if _log is None:
        return
    try:
        _log.append(_entry(action, object, outcome, fields))
    except (AuditError, LockHeldError, TypeError, ValueError):
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
        enable_audit(path, key_file=os.environ.get(AUDIT_KEY_VARIABLE) or None)
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
    # The entry comes last, so that no field can override who did it, or when.
    cleaned: dict[str, Any] = redacted({**context, **fields, **entry})
    # The fixed fields come first, whatever else there is.
    return {name: cleaned.pop(name) for name in entry} | cleaned


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
