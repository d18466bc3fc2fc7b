"""`ActorEnvironment`, a specification, and `PreparedEnvironment`, ready on a node."""

from __future__ import annotations

import platform
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rl_distributed.errors import ConfigError

__all__ = [
    "ActorEnvironment",
    "PreparedEnvironment",
    "as_texts",
    "check_positive",
    "driver_facts",
    "isolated_runtime_env",
]


@dataclass(frozen=True, slots=True)
class PreparedEnvironment:
    """An environment that is there and was checked, on one node."""

    label: str
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment for a process in it; empty: the driver's."""
    key: str | None = None
    """Name of its folder, where rl-distributed built it."""
    build_s: float = 0.0
    """Seconds that waiting for it to be built took; 0.0 where it was there."""
    preflight_s: float = 0.0
    """Seconds that checking it took; 0.0 where it had been checked before."""


@dataclass(frozen=True, kw_only=True)
class ActorEnvironment(ABC):
    """Specification of the Python environment that an actor class runs in.

    A specification is a small frozen object without imports of its own, so that the
    driver reads it where it cannot import the class. Each way is a subclass.
    """

    imports: tuple[str, ...] = ()
    """Modules that must be importable in it, checked before a worker is started."""
    preflight_deadline_s: float = 15.0
    """How long that check may take; raise it for modules that are slow to import."""

    def __post_init__(self) -> None:
        # Assignment is blocked, because the dataclass is frozen.
        object.__setattr__(self, "imports", as_texts("imports", self.imports))
        check_positive("preflight_deadline_s", self.preflight_deadline_s)

    @property
    @abstractmethod
    def label(self) -> str:
        """Its name in messages and in `rl env list`."""

    def resolve(self) -> ActorEnvironment:
        """Return the environment to prepare on this node.

        This one, unless the choice depends on what is installed.
        """
        return self

    @abstractmethod
    def prepare(
        self, root: Path | None = None, *, recheck: bool = False
    ) -> PreparedEnvironment:
        """Make it ready on this node, once, and check it.

        Args:
            root: folder of the built environments; None: see `default_root`.
            recheck: check it also where it has passed before.

        Raises:
            ActorEnvironmentError: it cannot be built, or is not fit for a worker.
            DeadlineExceededError: another process builds it for too long.
        """


def driver_facts() -> dict[str, str]:
    """Return the versions that a worker must share with its driver."""
    return {
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "ray": version("ray"),
        "rl_distributed": _own_version(),
    }


def _own_version() -> str:
    try:
        return version("rl-distributed")
    except PackageNotFoundError:
        # Run from sources on the path, without an installation.
        return "unknown"


def isolated_runtime_env(python: str | Path) -> dict[str, Any]:
    """Ray's runtime environment for a worker in the environment of `python`.

    Ray hands the command to a shell. Modules that the caller's PYTHONPATH names would
    come before the environment's own, so it is emptied; byte code is kept, or each
    start would compile every module again.
    """
    return {
        "py_executable": shlex.quote(str(python)),
        "env_vars": {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""},
    }


def as_texts(name: str, values: Any) -> tuple[str, ...]:
    """Check that `values` are non-empty lines of text and return them as a tuple."""
    if isinstance(values, str | bytes):
        raise ConfigError(f"{name} must be a list of texts: got {values!r}")
    texts = tuple(str(value) if isinstance(value, Path) else value for value in values)
    for text in texts:
        if not isinstance(text, str) or not text.strip() or "\n" in text:
            raise ConfigError(f"{name} must hold non-empty lines of text: got {text!r}")
    return texts


def check_positive(name: str, value: float) -> None:
    """Check that a number of seconds is positive."""
    if not value > 0:
        raise ConfigError(f"{name} must be positive: got {value!r}")
