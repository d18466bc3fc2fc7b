"""`rl audit`: verify the integrity of an audit log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_cli.console import Terminal
from rl_cli.options import Whole

if TYPE_CHECKING:
    from rl_distributed.errors import AuditError
    from rl_distributed.security.audit_chain import AuditSummary

_DIGEST = re.compile(r"[0-9a-f]{64}")


@click.group()
def audit() -> None:
    """Verify audit logs, which RL_AUDIT_LOG=FILE enables.

    \b
    Examples:
      rl audit verify audit.jsonl
      rl audit verify runs/grpo-001
    """


@audit.command(short_help="Verify that an audit log is intact.")
@click.argument("log", metavar="FILE|RUN", type=click.Path(path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), envvar="RL_AUDIT_KEY_FILE",
              help="File with the log's key; default: RL_AUDIT_KEY_FILE.")  # fmt: skip
@click.option("--last-digest", metavar="SHA256",
              help="Digest of an earlier check, whose line must exist.")  # fmt: skip
@click.option("--min-entries", default=0, type=Whole(0),
              help="Number of entries found by an earlier check.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(
    log: Path,
    key: Path | None,
    last_digest: str | None,
    min_entries: int,
    as_json: bool,
) -> int:
    """Verify that no line of an audit log was changed, moved or removed.

    FILE is the log; a RUN stands for the log that it was started with. Exits with 1 at
    the first broken line. Without --key, anyone who can write the file could recompute
    the chain; lines removed from the end are detected only with --last-digest or
    --min-entries.

    \b
    Examples:
      rl audit verify audit.jsonl
      rl audit verify runs/grpo-001 --key ~/keys/audit.key --json
    """
    from rl_distributed.errors import AuditError, ConfigError  # noqa: PLC0415
    from rl_distributed.security.audit_chain import verify_audit_log  # noqa: PLC0415

    # Checked first: a slip in it would be reported as a broken log.
    if last_digest is not None and not _DIGEST.fullmatch(last_digest):
        raise click.BadParameter(
            f"must be 64 hexadecimal digits, as printed by a check: got {last_digest}",
            param_hint="--last-digest",
        )
    path = _readable(_log_of(log), "audit log")
    if key is not None:
        _readable(key, "audit key")
    terminal = Terminal()
    try:
        found = verify_audit_log(
            path, key_file=key, last_digest=last_digest, min_entries=min_entries
        )
    except AuditError as error:
        if error.reason is None:  # it was not read, as with an invalid key
            raise ConfigError(str(error)) from None
        _tell_broken(terminal, path, error, as_json)
        return 1
    _tell_whole(terminal, path, found, as_json)
    return 0


def _log_of(log: Path) -> Path:
    """Return the log file; for a run, the one that it was started with.

    Raises:
        ConfigError: There is no such run, or it has no audit log.
    """
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    if not log.is_dir():
        return log
    try:
        record = json.loads((log / "run.json").read_text(encoding="utf-8"))
        named = record.get("audit_log")
    except (OSError, ValueError, AttributeError):
        raise ConfigError(
            f"{str(log)!r} is not the folder of a run (it has no readable run.json): "
            "give the folder of a run, or the file of an audit log"
        ) from None
    if not isinstance(named, str):
        raise ConfigError(
            f"the run in {log} was started without an audit log; set RL_AUDIT_LOG=FILE "
            "for the next one, or give the file of a log"
        )
    return Path(named)


def _readable(path: Path, what: str) -> Path:
    """Return a path after checking that it is a readable file.

    Raises:
        ConfigError: It cannot.
    """
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    reason = "it is not a file"
    try:
        # Checked first, because opening a named pipe would wait for a writer.
        if path.exists() is path.is_file():
            with path.open("rb"):
                return path
    except OSError as error:
        reason = str(error.strerror)
    raise ConfigError(f"{what} {path} cannot be read: {reason}; give a readable file")


def _tell_broken(
    terminal: Terminal, path: Path, error: AuditError, as_json: bool
) -> None:
    if as_json:
        shown = {"ok": False, "file": str(path), "line": error.line}
        terminal.raw(json.dumps({**shown, "reason": error.reason}))
    else:
        terminal.raw(f"broken: {error}")


def _tell_whole(
    terminal: Terminal, path: Path, found: AuditSummary, as_json: bool
) -> None:
    if as_json:
        shown: dict[str, Any] = {
            "ok": True,
            "file": str(path),
            "num_entries": found.num_entries,
            "first_time": found.first_time,
            "last_time": found.last_time,
            "last_digest": found.last_digest,
            "is_authentic": found.is_authentic,
        }
        terminal.raw(json.dumps(shown))
        return
    checked = "chain and key" if found.is_authentic else "chain; no key was given"
    terminal.raw(f"whole: {path} ({checked})")
    between = f", {found.first_time} to {found.last_time}" if found.num_entries else ""
    terminal.raw(f"entries: {found.num_entries}{between}")
    terminal.raw(f"last digest: {found.last_digest}")
