"""Environments that are there already: the driver's, an interpreter, an image."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rl_distributed.actor_environments.base import (
    ActorEnvironment,
    PreparedEnvironment,
    isolated_runtime_env,
)
from rl_distributed.actor_environments.preflight import check_python
from rl_distributed.errors import ActorEnvironmentError, ConfigError

__all__ = ["ContainerEnvironment", "DriverEnvironment", "InterpreterEnvironment"]


@dataclass(frozen=True)
class DriverEnvironment(ActorEnvironment):
    """The environment of the driver: nothing is isolated, and nothing costs time."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        return "driver"

    def prepare(
        self, root: Path | None = None, *, recheck: bool = False
    ) -> PreparedEnvironment:
        """Check the imports, if any are named."""
        if not self.imports:
            return PreparedEnvironment(self.label)
        took = check_python(
            [sys.executable],
            self.imports,
            self.preflight_deadline_s,
            self.label,
            recheck=recheck,
        )
        return PreparedEnvironment(self.label, preflight_s=took)


@dataclass(frozen=True)
class InterpreterEnvironment(ActorEnvironment):
    """An environment that somebody else made, by the path of its Python.

    It needs the driver's Python minor version, its Ray and its rl-distributed.
    """

    python: str | Path
    """Path of the interpreter, or a command that ends in one, the same on each node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not str(self.python).strip():
            raise ConfigError("python must be the path of an interpreter: got ''")
        object.__setattr__(self, "python", str(self.python))

    @property
    def label(self) -> str:
        """Its name in messages."""
        return str(self.python)

    def prepare(
        self, root: Path | None = None, *, recheck: bool = False
    ) -> PreparedEnvironment:
        """Check that it is there and fits the driver."""
        # A path may hold spaces; a command is split as a shell would.
        single = Path(self.label).exists()
        command = [self.label] if single else shlex.split(self.label)
        took = check_python(
            command,
            self.imports,
            self.preflight_deadline_s,
            self.label,
            recheck=recheck,
        )
        runtime_env = isolated_runtime_env(self.label)
        runtime_env["py_executable"] = shlex.join(command)
        return PreparedEnvironment(self.label, runtime_env, preflight_s=took)


@dataclass(frozen=True)
class ContainerEnvironment(ActorEnvironment):
    """A container image, run by podman through Ray's `image_uri`.

    The image holds the driver's Python minor version, its Ray and its rl-distributed,
    and `python` is on its PATH. It must have been pulled on each node: a pull has no
    place inside the start of a worker.
    """

    image: str
    """Name of the image, such as `team/engine:1.2`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # podman would parse a leading dash as an option.
        if not self.image or self.image.startswith("-") or " " in self.image:
            raise ConfigError(f"image must be the name of an image: got {self.image!r}")

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.image

    def prepare(
        self, root: Path | None = None, *, recheck: bool = False
    ) -> PreparedEnvironment:
        """Check that podman and the image are there, and the Python in it."""
        podman = shutil.which("podman")
        if podman is None:
            raise ActorEnvironmentError(
                f"image {self.image!r} needs podman, which Ray starts containers with "
                "and which is not on this node; install it, or use another environment"
            )
        try:
            found = subprocess.run(
                [podman, "image", "exists", self.image],
                capture_output=True,
                timeout=self.preflight_deadline_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ActorEnvironmentError(
                f"podman did not answer in {self.preflight_deadline_s:g} s whether "
                f"image {self.image!r} is there; raise preflight_deadline_s"
            ) from None
        if found.returncode != 0:
            raise ActorEnvironmentError(
                f"image {self.image!r} is not on this node; run: "
                f"podman pull {shlex.quote(self.image)}"
            )
        command = [podman, "run", "--rm", "--network=none", "--entrypoint", "python"]
        took = check_python(
            [*command, self.image],
            self.imports,
            self.preflight_deadline_s,
            self.label,
            recheck=recheck,
        )
        return PreparedEnvironment(
            self.label, {"image_uri": self.image}, preflight_s=took
        )
