"""Environments of a uv workspace, from its lock."""

from __future__ import annotations

import functools
import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_distributed.actor_environments.built import BuiltEnvironment
from rl_distributed.actor_environments.driver_wheel import (
    editable_folder,
    normal_name,
)
from rl_distributed.actor_environments.uv_tool import Uv
from rl_distributed.errors import ActorEnvironmentError, ConfigError

__all__ = ["UvWorkspaceEnvironment", "workspace_of"]

_LOCK = "uv.lock"


@dataclass(frozen=True)
class UvWorkspaceEnvironment(BuiltEnvironment):
    """A distribution of a uv workspace as its `uv.lock` says, without a resolution.

    Members of the workspace are installed in editable mode: the workers run the
    sources of the checkout, which must lie at the same place on every node.
    """

    distribution: str
    extra: str = ""
    """An extra of the distribution; empty: none."""
    group: str = ""
    """A dependency group of the distribution; empty: none."""
    workspace: str | Path = ""
    """Folder of `uv.lock`; empty: the checkout that the distribution comes from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.distribution:
            raise ConfigError("distribution must be a name: got ''")
        found = self.workspace or workspace_of(self.distribution) or ""
        object.__setattr__(
            self, "workspace", str(Path(found).resolve() if found else "")
        )

    @property
    def label(self) -> str:
        """Distribution and extra, as pip writes them, and the group."""
        extra = f"[{self.extra}]" if self.extra else ""
        return f"{self.distribution}{extra}" + (f":{self.group}" if self.group else "")

    def _lock(self) -> Path:
        lock = Path(self.workspace) / _LOCK
        if not self.workspace or not lock.is_file():
            place = self.workspace or f"a checkout of {self.distribution}"
            raise ActorEnvironmentError(
                f"environment {self.label!r} is built from a uv workspace, but there "
                f"is no {_LOCK} in {place} on this node; name its folder by "
                "`workspace`, or use InstalledEnvironment"
            )
        return lock

    def fingerprint(self) -> dict[str, Any]:
        """Return the lock, the metadata of its members, and the chosen parts."""
        lock = self._lock()
        return {
            "lock": _file_hash(lock),
            # The lock omits entry points, which an installation copies
            # from the project files.
            "members": {m: _file_hash(lock.parent / m) for m in _member_files(lock)},
            "workspace": str(lock.parent),
            "taken": [self.distribution, self.extra, self.group],
        }

    def build(self, folder: Path, deadline_s: float) -> None:
        """Sync it from the lock, using uv's cache and the sources named there."""
        workspace = self._lock().parent
        uv = Uv(f"environment {self.label!r}", deadline_s)
        uv.create_venv(folder)
        # As locked, and without the development tools, which workers do not need.
        arguments = ["sync", "--frozen", "--no-default-groups"]
        arguments += ["--package", self.distribution]
        arguments += ["--extra", self.extra] if self.extra else []
        arguments += ["--group", self.group] if self.group else []
        variables = {"UV_PROJECT_ENVIRONMENT": str(folder)}
        uv.run(arguments, variables=variables, cwd=workspace)


def workspace_of(distribution: str) -> Path | None:
    """Get the uv workspace whose checkout a distribution is installed from, or None."""
    project = editable_folder(distribution)
    if project is None:
        return None
    for folder in (project, *project.parents):
        lock = folder / _LOCK
        if lock.is_file():
            known = {str(package["name"]) for package in _locked_packages(lock)}
            return folder if normal_name(distribution) in known else None
    return None


def _locked_packages(lock: Path) -> list[dict[str, Any]]:
    return _read_lock(lock, lock.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read_lock(lock: Path, changed: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(lock.read_text()).get("package", [])
    return found


def _member_files(lock: Path) -> list[str]:
    """Return the project files of the workspace's members, relative to the lock."""
    folders = [
        package["source"]["editable"]
        for package in _locked_packages(lock)
        if "editable" in package.get("source", {})
    ]
    return [f"{folder}/pyproject.toml" for folder in sorted(folders)]


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
