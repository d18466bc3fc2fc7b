"""Running uv: finding it, passing on pip's configuration, reporting its errors."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rl_distributed.actor_environments.preflight import redacted
from rl_distributed.errors import ActorEnvironmentError

__all__ = ["Uv", "find_uv", "pip_sources"]

logger = logging.getLogger(__name__)

_TAIL_LINES = 25
_PIP_DEADLINE_S = 20.0
# They describe the environment of the driver, which is not the one that is built.
# Compiling everything ahead takes longer than the imports that are ever made.
_NOT_INHERITED = (
    "CONDA_PREFIX",
    "PYTHONHOME",
    "PYTHONPATH",
    "UV_COMPILE_BYTECODE",
    "UV_PROJECT",
    "UV_PROJECT_ENVIRONMENT",
    "UV_PYTHON",
    "VIRTUAL_ENV",
)


def find_uv() -> str:
    """Return the uv program: that of the installed package, or else the one on PATH.

    Raises:
        ActorEnvironmentError: there is none.
    """
    with suppress(ImportError, FileNotFoundError):
        found: str = importlib.import_module("uv").find_uv_bin()
        return found
    on_path = shutil.which("uv")
    if on_path is None:
        raise ActorEnvironmentError(
            "building an environment needs uv, which is neither installed beside "
            f"{sys.executable} nor on PATH; run: "
            "pip install rl-distributed[environments]"
        )
    return on_path


def pip_sources() -> dict[str, str]:
    """Return the package sources of the user's pip as variables that uv reads.

    Wheel folders and indexes are taken from pip's variables and configuration files,
    each only where uv's own variable is not set.
    """
    values: dict[str, list[str]] = {
        name: os.environ.get(f"PIP_{name.upper().replace('-', '_')}", "").split()
        for name in ("find-links", "index-url", "extra-index-url")
    }
    for name in values:
        values[name] = values[name] or _configured(name)
    given = {
        "UV_FIND_LINKS": ",".join(values["find-links"]),
        "UV_DEFAULT_INDEX": " ".join(values["index-url"][:1]),
        "UV_INDEX": " ".join(values["extra-index-url"]),
    }
    return {k: v for k, v in given.items() if v and k not in os.environ}


def _configured(name: str) -> list[str]:
    # Environments made by uv have no pip.
    for pip in ([sys.executable, "-m", "pip"], [shutil.which("pip") or "pip"]):
        try:
            done = subprocess.run(
                [*pip, "config", "get", f"global.{name}"],
                capture_output=True,
                text=True,
                timeout=_PIP_DEADLINE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return done.stdout.split()
    return []


class Uv:
    """uv, for the building of one environment.

    Args:
        what: name of the environment, for messages.
        deadline_s: how long all its commands together may take.
    """

    def __init__(self, what: str, deadline_s: float) -> None:
        self._program = find_uv()
        self._what = what
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s

    def create_venv(self, folder: Path) -> Path:
        """Make an empty environment of the driver's Python; returns its interpreter.

        Its scripts find their interpreter beside them, so the folder can be renamed.
        """
        self.run(
            ["venv", "--no-project", "--relocatable", "--python", sys.executable],
            folder,
        )
        return folder / "bin" / "python"

    def run(
        self,
        arguments: Sequence[str],
        *paths: Path,
        variables: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Run one command.

        Args:
            arguments: its words.
            paths: further words.
            variables: further environment variables.
            cwd: folder to run in; uv reads the configuration of a project there.

        Raises:
            ActorEnvironmentError: it failed or took too long; the message ends with
                what uv said.
        """
        command = [self._program, *arguments, *map(str, paths)]
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        # It must be the driver's Python, which is already installed.
        environment |= {"UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never"}
        environment |= variables or {}
        logger.debug("uv %s", redacted(" ".join(command[1:])))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            # Otherwise uv would read the project configuration of the current folder.
            cwd=cwd or os.sep,
            start_new_session=True,
        )
        try:
            left_s = max(0.0, self._end - time.monotonic())
            _, said = process.communicate(timeout=left_s)
        except BaseException as error:
            # uv runs build backends, which end with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ActorEnvironmentError(
                    f"{self._what} was not built in build_deadline_s "
                    f"({self._deadline_s:g} s), at: uv {arguments[0]}; raise it, or "
                    "give a wheel folder by find_links where the network is slow"
                ) from None
            raise
        if process.returncode != 0:
            tail = "\n".join(said.strip().splitlines()[-_TAIL_LINES:])
            raise ActorEnvironmentError(
                f"{self._what} cannot be built: uv {arguments[0]} ended with exit code "
                f"{process.returncode}:\n{redacted(tail)}"
            )
