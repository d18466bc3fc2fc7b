"""The chain of an audit log: digests of its lines, codes by a key, and its check."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_distributed.errors import AuditError

__all__ = [
    "AuditSummary",
    "code_of",
    "digest_of",
    "create_audit_key",
    "read_key",
    "verify_audit_log",
]

logger = logging.getLogger(__name__)

_NO_LINE = "0" * 64
_CODE = re.compile(rb'^(?P<body>.*), "hmac": "(?P<code>[0-9a-f]{64})"\}$', re.DOTALL)
_KEY_BYTES = 32
_SHORTEST_KEY = 16


@dataclass(frozen=True, slots=True)
class AuditSummary:
    """Contents of a whole audit log."""

    num_entries: int
    last_digest: str
    """SHA-256 of the last line. Kept elsewhere and given to `verify_audit_log`, it also
    proves that no line was taken from the end."""
    is_authentic: bool = False
    """Whether every line was checked with the key."""
    first_time: str | None = None
    """Time of the first entry, as ISO 8601 in UTC; None where there is none."""
    last_time: str | None = None
    """Time of the last entry."""


def digest_of(line: bytes | None) -> str:
    """Return the SHA-256 of a line, which the next one holds; None: of no line."""
    return _NO_LINE if line is None else hashlib.sha256(line).hexdigest()


def code_of(key: bytes, line: bytes) -> str:
    """Return the code of a line (HMAC-SHA256), as hexadecimal digits."""
    return hmac.new(key, line, hashlib.sha256).hexdigest()


def create_audit_key(path: str | os.PathLike[str]) -> Path:
    """Write a new key for audit logs to a file that only its owner can read.

    Anyone who can read it can also write entries that pass the check, so keep it
    unreadable to others who may write to the log.

    Raises:
        AuditError: the file is there already, or cannot be written.
    """
    place = Path(path).resolve()
    # Never overwrites a key, and is private from the first moment.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(place, flags, stat.S_IRUSR | stat.S_IWUSR)
        with os.fdopen(file, "w") as key:
            key.write(secrets.token_hex(_KEY_BYTES) + "\n")
    except FileExistsError:
        raise AuditError(
            f"audit key {place} is there already; lines that it has signed could not "
            "be checked without it: name another file"
        ) from None
    except OSError as error:
        raise AuditError(f"audit key {place} cannot be written: {error}") from error
    return place


def read_key(path: Path) -> bytes:
    """Read a file of `create_audit_key`.

    Raises:
        AuditError: It cannot be read, or is too short for a key.
    """
    try:
        key = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise AuditError(
            f"audit key {path} cannot be read: {error}; make one with create_audit_key"
        ) from error
    if len(key) < _SHORTEST_KEY:
        raise AuditError(
            f"audit key {path} holds {len(key)} bytes, and at least {_SHORTEST_KEY} "
            "are needed; make one with create_audit_key"
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("audit key %s can be read by others: chmod 600", path)
    return key


def verify_audit_log(
    path: str | os.PathLike[str],
    *,
    key_file: str | os.PathLike[str] | None = None,
    last_digest: str | None = None,
    min_entries: int = 0,
) -> AuditSummary:
    """Check that an audit log with a chain is whole.

    Args:
        path: the file.
        key_file: the key that its lines were written with. Without it, a change of the
            last line does not show, nor one after which the chain was computed again.
        last_digest: `AuditSummary.last_digest` from earlier; the line that it belongs
            to must still be there. Without it, lines taken from the end do not show.
        min_entries: how many entries there were earlier. Without it and `last_digest`,
            a file that was emptied does not show.

    Raises:
        AuditError: a line is missing, was changed, or is not whole; the message names
            the first such line, and so do its `line` and `reason`.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise AuditError(f"audit log {path} cannot be read: {error}") from error
    key = None if key_file is None else read_key(Path(key_file))
    *lines, rest = data.split(b"\n")
    previous: bytes | None = None
    seen, times = {_NO_LINE}, []
    for number, line in enumerate(lines, start=1):
        if key is not None and (reason := _wrong_code(line, key)):
            raise _broken(path, number, reason)
        entry = _parsed(line)
        if entry is None:
            reason = f"is no entry with a chain: {line[:80]!r}"
            raise _broken(path, number, reason)
        if entry["previous"] != digest_of(previous):
            reason = "does not follow: the line before it was changed or taken out"
            raise _broken(path, number, reason)
        times.append(entry.get("time"))
        previous = line
        seen.add(digest_of(line))
    if rest:
        raise _broken(path, len(lines) + 1, "is not whole")
    _check_end(path, len(lines), min_entries, last_digest, seen)
    return AuditSummary(
        len(lines),
        digest_of(previous),
        is_authentic=key is not None,
        first_time=_shown_time(times[:1]),
        last_time=_shown_time(times[-1:]),
    )


def _broken(path: str | os.PathLike[str], line: int, reason: str) -> AuditError:
    error = AuditError(f"audit log {path}, line {line} {reason}")
    error.line, error.reason = line, reason
    return error


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return an entry that has a chain; None: it is none."""
    try:
        entry = json.loads(line)
    # Brackets in brackets, written to break whoever reads them.
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and "previous" in entry else None


def _wrong_code(line: bytes, key: bytes) -> str | None:
    """Return what is wrong with the code of a line; None: nothing."""
    found = _CODE.match(line)
    if found is None:
        return f"was written without the key: {line[:80]!r}"
    body = found["body"] + b"}"
    if not hmac.compare_digest(code_of(key, body), found["code"].decode()):
        return "was changed, or was written with another key"
    return None


def _shown_time(times: list[Any]) -> str | None:
    return str(times[0]) if times and times[0] is not None else None


def _check_end(
    path: str | os.PathLike[str],
    num_entries: int,
    min_entries: int,
    last_digest: str | None,
    seen: set[str],
) -> None:
    """Raise AuditError where what an earlier check saw is gone."""
    reason = None
    if num_entries < min_entries:
        reason = (
            f" has {num_entries} entries, and there were at least {min_entries}; lines "
            "were taken from the end"
        )
    elif last_digest is not None and last_digest not in seen:
        reason = (
            f": the line with digest {last_digest[:12]}... is gone; lines were taken "
            "from the end"
        )
    if reason is not None:
        error = AuditError(f"audit log {path}{reason}")
        error.reason = reason.removeprefix(":").strip()
        raise error
