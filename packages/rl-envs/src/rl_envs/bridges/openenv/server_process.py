"""`ServerProcess`: a server that is started when it is needed, and ends with us."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from rl_distributed.actor_environments import ExtraEnvironment
from rl_envs.bridges.openenv.config import PORT, PYTHON, OpenEnvServer
from rl_envs.errors import EnvironmentServerError

__all__ = ["ServerProcess"]

_KEEPER = Path(__file__).with_name("keeper.py")
# The keeper gives a server five seconds to end by itself.
_END_S = 15.0
_LOOK_S = 0.02
_SHOWN_BYTES = 1000


class ServerProcess:
    """The server of the settings: one that runs, or one that `command` starts.

    Args:
        server: The settings.
    """

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._address = server.address or ""
        self._end: weakref.finalize[..., ServerProcess] | None = None

    def address(self) -> str:
        """Return where the server listens; a command that has ended is run again.

        Raises:
            EnvironmentServerError: It does not start.
            ActorEnvironmentError: The environment of `{python}` cannot be built.
        """
        if self._server.address is not None:
            return self._server.address
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self._address

    def close(self) -> None:
        """End the server, if it was started here."""
        with self._lock:
            self._process = None
            if self._end is not None:
                self._end()

    def _start(self) -> None:
        if self._end is not None:
            self._end()
        port = _free_port()
        command = self._command(port)
        # Open as long as the process, for its last words.
        log = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-I", str(_KEEPER), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self._variables(),
            # Ctrl-C is for the owner, which ends the server when it ends.
            start_new_session=True,
        )
        # Also where nobody calls `close`: when this object or the process goes.
        self._end = weakref.finalize(self, _end, process, log)
        self._process, self._address = process, f"http://127.0.0.1:{port}"
        try:
            self._wait(process, command, port, log)
        except EnvironmentServerError:
            self._process = None
            self._end()
            raise

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        command: Sequence[str],
        port: int,
        log: IO[bytes],
    ) -> None:
        """Wait until the server listens."""
        until_s = time.monotonic() + self._server.start_s
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return
            if process.poll() is not None:
                problem = f"ended with exit code {process.returncode}"
            elif time.monotonic() > until_s:
                problem = f"took more than {self._server.start_s:g} s (start_s)"
            else:
                time.sleep(_LOOK_S)
                continue
            said = _tail(log)
            raise EnvironmentServerError(
                f"the command {shlex.join(command)} {problem} before it listened on "
                f"port {port}" + (f"; it said: {said}" if said else "")
            )

    def _command(self, port: int) -> list[str]:
        words = self._server.command
        if any(PYTHON in word for word in words):
            python = _isolated_python()
            words = tuple(word.replace(PYTHON, python) for word in words)
        return [word.replace(PORT, str(port)) for word in words]

    def _variables(self) -> dict[str, str] | None:
        if not any(PYTHON in word for word in self._server.command):
            return None
        # Modules of the caller must not come before those of the other environment.
        return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def _isolated_python() -> str:
    environment = ExtraEnvironment(
        "rl-envs", "openenv-server", imports=("uvicorn",), preflight_deadline_s=60.0
    )
    prepared = environment.prepare()
    [python] = shlex.split(prepared.runtime_env.get("py_executable", sys.executable))
    return python


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    part = os.pread(log.fileno(), _SHOWN_BYTES, max(0, size - _SHOWN_BYTES))
    return part.decode(errors="replace").strip()


def _end(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.close()
