"""The file of keys: made and changed by `rl keys`, read by all that listens.

```
rl keys ----lock, replace----> keys.json (0600) <----stat, read if new---- listeners
```
A listener looks at each request whether the file has changed, so that a revoked key is
refused from then on. A file that cannot be read, or that others could read or change,
admits nobody.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rl_distributed.access.access_key import AccessKey
from rl_distributed.access.rate_limit import RateLimit
from rl_distributed.access.roles import Role
from rl_distributed.errors import ConfigError, SecurityError
from rl_distributed.file_lock import FileLock
from rl_distributed.logs.logging import get_logger
from rl_distributed.private_files import create_private_folder, write_private_text
from rl_distributed.security.audit import audit

__all__ = ["KEYS_VARIABLE", "KeyFile", "default_key_file", "private_config_folder"]

_logger = get_logger(__name__)

KEYS_VARIABLE = "RL_KEYS_FILE"
"""Names the file of keys where no option does."""
_FORMAT = "rl-keys-1"
_LARGEST = 4 << 20
_DEADLINE_S = 10.0


def private_config_folder() -> Path:
    """Return the folder of this user's keys and certificates; it need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path.home() / ".config") / "rl"


def default_key_file() -> Path:
    """Return the file of keys that is used unless another one is named."""
    named = os.environ.get(KEYS_VARIABLE, "")
    return Path(named) if named else private_config_folder() / "keys.json"


@dataclass
class _Seen:
    """The file as it was read last."""

    mark: tuple[int, ...] | None = None
    keys: dict[str, AccessKey] = field(default_factory=dict)
    problem: str = ""


class KeyFile:
    """Keys in a file that only its owner can read.

    Its methods may be called by several threads, and by several processes.

    Args:
        path: The file; `create` makes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self._seen, self._lock = _Seen(), threading.Lock()

    def create(
        self,
        name: str,
        role: Role,
        *,
        lifetime: timedelta | None = None,
        rate: RateLimit | None = None,
        by: str | None = None,
    ) -> tuple[AccessKey, str]:
        """Create a key, and store its digest.

        Args:
            name: Name of the person or program that receives it, unlike that of any
                other valid key.
            role: Role, which decides what it permits.
            lifetime: Time until it expires; None: until it is revoked.
            rate: Requests per time at each listener; None: unlimited.
            by: Name of the requester in the audit log; None: the user of this process.

        Returns:
            The stored record, and the key, which is not stored.

        Raises:
            ConfigError: The name is taken, or an argument is wrong.
            SecurityError: The file cannot be read or written.
        """
        stored, key = AccessKey.generate(name, role, lifetime=lifetime, rate=rate)

        def add(keys: Sequence[AccessKey]) -> list[AccessKey]:
            taken = [k for k in keys if k.name == name and k.state() == "valid"]
            if taken:
                raise ConfigError(
                    f"there is a valid key named {name!r} already ({taken[0].id}): "
                    "choose another name, or revoke that one"
                )
            return [*keys, stored]

        self._change(add)
        audit(
            "keys.create",
            stored.id,
            **_who(by),
            name=name,
            role=role,
            expires=stored.expires,
        )
        return stored, key

    def revoke(self, which: str, *, by: str | None = None) -> AccessKey:
        """Revoke a key from now on.

        Args:
            which: Its id, or the name of a valid one.
            by: Name of the requester in the audit log; None: the user of this process.

        Returns:
            The key, revoked.

        Raises:
            ConfigError: There is no such key, or it is revoked already.
            SecurityError: The file cannot be read or written.
        """
        revoked: list[AccessKey] = []

        def end(keys: Sequence[AccessKey]) -> list[AccessKey]:
            found = _find(keys, which)
            revoked.append(found.revoke())
            return [revoked[0] if key is found else key for key in keys]

        self._change(end)
        audit("keys.revoke", revoked[0].id, **_who(by), name=revoked[0].name)
        return revoked[0]

    def read(self) -> list[AccessKey]:
        """Return all keys, the oldest first; [] where there is no file yet.

        Raises:
            SecurityError: The file is damaged, or others could read or change it.
        """
        try:
            return list(_read(self.path))
        except FileNotFoundError:
            return []

    def check(self) -> None:
        """Check that the file is there and can be used.

        Raises:
            SecurityError: It cannot.
        """
        try:
            _read(self.path)
        except FileNotFoundError:
            raise SecurityError(
                f"there is no file of keys {self.path}: make a key first, as by "
                f"rl keys create --file {self.path}"
            ) from None

    def find(self, identity: str) -> AccessKey | None:
        """Return a key by its id, from the file as it is now; None: there is none.

        A file that cannot be used has no keys; the log says why, once.
        """
        with self._lock:
            mark = _mark(self.path)
            if mark is None or mark != self._seen.mark:
                self._seen = self._look(mark)
            return self._seen.keys.get(identity)

    def _look(self, mark: tuple[int, ...] | None) -> _Seen:
        try:
            return _Seen(mark, {key.id: key for key in _read(self.path)})
        except (OSError, ConfigError) as error:
            # SecurityError is an OSError.
            if str(error) != self._seen.problem:
                _logger.error("no key is admitted until this is mended: %s", error)
            return _Seen(mark, {}, str(error))

    def _change(self, change: Callable[[Sequence[AccessKey]], list[AccessKey]]) -> None:
        try:
            create_private_folder(self.path.parent)
            lock = FileLock(
                self.path.with_name(f".{self.path.name}.lock"),
                "changing the keys",
                mode=stat.S_IRUSR | stat.S_IWUSR,
            )
            # From reading to writing: a key that another process creates in between
            # would be lost.
            with lock.held(_DEADLINE_S):
                keys = [key.to_dict() for key in change(self.read())]
                text = json.dumps({"format": _FORMAT, "keys": keys}, indent=1)
                write_private_text(self.path, text + "\n")
        except (SecurityError, ConfigError):
            raise
        except OSError as error:
            raise SecurityError(
                f"the file of keys {self.path} cannot be written: {error}; choose "
                f"another one (--file, or {KEYS_VARIABLE})"
            ) from error


def _who(by: str | None) -> dict[str, str]:
    return {} if by is None else {"by": by}


def _find(keys: Sequence[AccessKey], which: str) -> AccessKey:
    for key in keys:
        if key.id == which or (key.name == which and key.revoked is None):
            if key.revoked is not None:
                raise ConfigError(f"key {key.id} ({key.name}) was revoked already")
            return key
    raise ConfigError(
        f"there is no key {which!r}: give the id or the name that rl keys list shows"
    )


def _mark(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # The inode, because each change replaces the file; the mode, because a chmod can
    # make it unusable, or mend it, without a new content.
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode)


def _read(path: Path) -> list[AccessKey]:
    """Read the keys of a file that is this user's alone.

    Raises:
        FileNotFoundError: There is none.
        SecurityError: It is damaged, or others could read or change it.
    """
    try:
        with open(path, "rb") as file:
            # Of the open file, so that another cannot take its place after the check.
            found = os.fstat(file.fileno())
            _check_owner(path, found)
            content = json.loads(file.read(_LARGEST + 1))
        return _parsed(content)
    except (FileNotFoundError, SecurityError):
        raise
    except OSError as error:
        raise SecurityError(
            f"the file of keys {path} cannot be read: {error}"
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SecurityError(
            f"{path} is not a file of keys ({error}): restore it, or create a new one "
            "with rl keys create"
        ) from error


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SecurityError(f"the file of keys {path} must be a plain file")
    if found.st_uid not in (os.getuid(), 0):
        raise SecurityError(
            f"the file of keys {path} belongs to another user: make one of your own"
        )
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecurityError(
            f"the file of keys {path} must be its owner's alone, and has mode "
            f"{stat.S_IMODE(found.st_mode):o}: run chmod 600 {path}"
        )


def _parsed(content: Any) -> list[AccessKey]:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}")
    keys = [AccessKey.from_dict(entry) for entry in content["keys"]]
    if len({key.id for key in keys}) != len(keys):
        raise ValueError("two keys have one id")
    return keys
