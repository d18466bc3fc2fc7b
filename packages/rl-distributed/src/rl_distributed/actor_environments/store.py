"""The store of built environments on a node.

```
lock of the key -> build in .build-<key>-<random> -> .ready -> rename to <key>
```
A folder named by its key is whole, because it gets that name last. A builder that is
killed leaves a `.build-` folder, which the next builder of the same key, or `prune`,
removes. Every process that runs in an environment holds a shared lock on its `.in-use`
file from its first instruction, so no environment in use is removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rl_distributed.errors import ActorEnvironmentError
from rl_distributed.file_lock import FileLock, is_locked

__all__ = ["EnvironmentStore", "StoredEnvironment", "default_root"]

logger = logging.getLogger(__name__)

_READY = ".ready"
_IN_USE = ".in-use"
_LAST_USE = ".last-use"
_BUILDING = ".build-"
_TRASH = ".trash-"
_LOCKS = ".locks"
_DAY_S = 86_400.0
# Between preparing an environment and the first instruction of its worker.
_START_GRACE_S = 60.0
# Imported by every interpreter of the environment when it starts. A file system that
# has no locks is no reason not to start.
_LEASE_MODULE = "_actor_environment_in_use"
_LEASE = f"""import fcntl, os, sys
try:
    lease = os.open(os.path.join(sys.prefix, {_IN_USE!r}), os.O_RDONLY)
    fcntl.flock(lease, fcntl.LOCK_SH)
except OSError:
    pass
"""

State = Literal["ready", "building", "broken", "absent"]


class Buildable(Protocol):
    """The part of an environment that the store needs."""

    @property
    def build_deadline_s(self) -> float:
        """How long building it, or waiting for that, may take."""

    @property
    def label(self) -> str:
        """Its name for people."""

    def key(self) -> str:
        """Name of its folder."""

    def build(self, folder: Path, deadline_s: float) -> None:
        """Make it in a folder that does not exist yet."""


@dataclass(frozen=True, slots=True)
class StoredEnvironment:
    """One folder of the store."""

    key: str
    label: str
    path: Path
    state: State
    size_bytes: int = 0
    """As built; files that are shared with uv's cache count fully."""
    built_s: float = 0.0
    last_use: float = 0.0
    """Seconds since the epoch; 0.0 where it never was ready."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"


def default_root() -> Path:
    """`RL_ENV_ROOT`, or `rl/environments` in the user's cache folder."""
    if given := os.environ.get("RL_ENV_ROOT"):
        return Path(given).expanduser().resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rl" / "environments"


class EnvironmentStore:
    """The built environments of one node, or of several that share a file system.

    Args:
        root: its folder; None: `default_root()`.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = default_root() if root is None else Path(root).resolve()

    def ensure(self, environment: Buildable) -> tuple[StoredEnvironment, float]:
        """Get the environment, built if it is not there, and the seconds waited for it.

        Any number of processes may ask at the same time: one builds, the others wait
        for it.

        Raises:
            ActorEnvironmentError: it could not be built.
            LockHeldError: another process has been building it for longer than
                `build_deadline_s`.
        """
        key = environment.key()
        found = self._look(key)
        if found.state == "ready":
            self._touch(found.path)
            return found, 0.0
        start = time.perf_counter()
        what = f"environment {environment.label!r}"
        lock = FileLock(
            self._lock_path(key),
            f"building {what}",
            remedy="wait for that process or end it, or raise build_deadline_s",
        )
        try:
            with lock.held(environment.build_deadline_s):
                # Another process may have built it while this one waited for the lock.
                found = self._look(key)
                if found.state != "ready":
                    self._build(environment, key)
                    found = self._look(key)
                self._touch(found.path)
        except OSError as error:
            # The lock was held for too long, and that error has its own message.
            if isinstance(error, TimeoutError):
                raise
            raise ActorEnvironmentError(
                f"{what} cannot be built in {self.root}: {error}; set RL_ENV_ROOT to "
                "a folder with room that this user may write to"
            ) from error
        return found, time.perf_counter() - start

    def find(self, key: str) -> StoredEnvironment:
        """Return the environment of this key, whatever its state."""
        found = self._look(key)
        if found.state != "ready" and is_locked(self._lock_path(key)):
            return StoredEnvironment(key, found.label, found.path, "building")
        return found

    def environments(self) -> list[StoredEnvironment]:
        """All that is there, by key; also what an interrupted builder left.

        Only what this store has locked once is counted, and so removed by `prune`: the
        root may hold other things.
        """
        locks = sorted((self.root / _LOCKS).glob("*.lock"))
        found = [self.find(path.name.removesuffix(".lock")) for path in locks]
        return [stored for stored in found if stored.state != "absent"]

    def prune(
        self,
        unused_days: float | None = None,
        *,
        dry_run: bool = False,
        start_grace_s: float = _START_GRACE_S,
    ) -> list[StoredEnvironment]:
        """Remove what interrupted builders left, and environments out of use.

        One that a process runs in stays, whatever else is asked for, and so does one
        that was handed out within the last `start_grace_s`.

        Args:
            unused_days: remove also those not used for this many days; 0: all, None:
                none.
            dry_run: only report.
            start_grace_s: how long a process that was just given one may take to start.

        Returns:
            The environments that were removed, or would be.
        """
        removed = []
        for stored in self.environments():
            if stored.state == "building":
                continue
            if stored.state == "ready":
                unused_s = time.time() - stored.last_use
                wanted = unused_days is not None and unused_s >= unused_days * _DAY_S
                if not wanted or unused_s < start_grace_s:
                    continue
            if self._is_free(stored) and (dry_run or self._remove_free(stored)):
                removed.append(stored)
        if not dry_run:
            for path in self._folders(_TRASH):
                # Only names that `_remove` creates: the root may contain other things.
                if re.fullmatch("[0-9a-f]{32}", path.name.removeprefix(_TRASH)):
                    shutil.rmtree(path, ignore_errors=True)
        return removed

    def _build(self, environment: Buildable, key: str) -> None:
        self._remove(key)
        logger.info("building environment %r in %s", environment.label, self.root)
        folder = self.root / f"{_BUILDING}{key}-{uuid.uuid4().hex[:8]}"
        start = time.perf_counter()
        try:
            environment.build(folder, environment.build_deadline_s)
            # Before the rename, because processes may start in the folder
            # right after it.
            (folder / _IN_USE).touch()
            for packages in folder.glob("lib/python*/site-packages"):
                (packages / f"{_LEASE_MODULE}.py").write_text(_LEASE)
                (packages / f"{_LEASE_MODULE}.pth").write_text(
                    f"import {_LEASE_MODULE}\n"
                )
            took = time.perf_counter() - start
            record = {
                "label": environment.label,
                "built_s": round(took, 3),
                "size_bytes": _size(folder),
            }
            # Written last, because it vouches for everything else in the folder.
            _write_synced(folder / _READY, json.dumps(record))
            folder.rename(self.root / key)
        # Also on an interrupt; leftovers of a kill are removed by the next builder.
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        logger.info("environment %r is ready after %.1f s", environment.label, took)

    @staticmethod
    def _is_free(stored: StoredEnvironment) -> bool:
        return not is_locked(stored.path / _IN_USE)

    def _remove_free(self, stored: StoredEnvironment) -> bool:
        """Remove it, unless somebody builds it or starts to use it at this moment."""
        try:
            with FileLock(self._lock_path(stored.key), stored.label).held():
                # It may have been built, or given to a worker that is about to start,
                # since it was listed.
                now = self._look(stored.key)
                is_same = (now.state, now.last_use) == (stored.state, stored.last_use)
                if not (is_same and self._is_free(now)):
                    return False
                self._remove(stored.key)
        except TimeoutError:
            return False
        return True

    def _remove(self, key: str) -> None:
        """Remove all of a key; the caller holds its lock."""
        remains = [self.root / key, *self._folders(f"{_BUILDING}{key}-")]
        for path in remains:
            if path.exists():
                # Renamed first: a folder named by its key is always whole.
                trash = self.root / f"{_TRASH}{uuid.uuid4().hex}"
                path.rename(trash)
                shutil.rmtree(trash, ignore_errors=True)

    def _look(self, key: str) -> StoredEnvironment:
        path = self.root / key
        remains = path.exists() or any(self._folders(f"{_BUILDING}{key}-"))
        record = _read_record(path / _READY)
        label = record.get("label", key.rpartition("-")[0])
        stored = StoredEnvironment(key, label, path, "broken" if remains else "absent")
        # The base interpreter may have been removed since it was built.
        if not record or not os.access(stored.python, os.X_OK):
            return stored
        return StoredEnvironment(
            key,
            label,
            path,
            "ready",
            int(record.get("size_bytes", 0)),
            float(record.get("built_s", 0.0)),
            _last_use(path),
        )

    def _folders(self, prefix: str) -> list[Path]:
        if not self.root.is_dir():
            return []
        return [p for p in self.root.iterdir() if p.name.startswith(prefix)]

    def _lock_path(self, key: str) -> Path:
        return self.root / _LOCKS / f"{key}.lock"

    @staticmethod
    def _touch(path: Path) -> None:
        try:
            (path / _LAST_USE).touch()
        except OSError:
            # A root that others filled and this user only reads.
            logger.debug("cannot note the use of %s", path)


def _last_use(path: Path) -> float:
    for name in (_LAST_USE, _READY):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _size(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            total += os.lstat(os.path.join(base, name)).st_size
    return total
