"""`HostProcess`: requests to the process that has verifiers.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| `submit` (any thread) | a request | a future | the start | a reply, `start_s` |
| reader (thread) | lines of the host | results of futures | the host | its end |
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rl_distributed.actor_environments import ExtraEnvironment
from rl_distributed.errors import ActorEnvironmentError
from rl_envs.bridges.verifiers.config import VerifiersHost
from rl_envs.errors import AgentError, AgentSetupError

__all__ = ["HostProcess"]

_HOST = Path(__file__).with_name("host.py")
_END_S = 10.0
_SHOWN_BYTES = 1500

_Pending = dict[int, "Future[Any]"]


class HostProcess:
    """The process of an environment; it starts when it is needed, and again if it ends.

    Args:
        settings: Which environment.
    """

    def __init__(self, settings: VerifiersHost) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: _Pending = {}
        self._end: weakref.finalize[..., HostProcess] | None = None

    def submit(self, request: Mapping[str, Any]) -> tuple[int, Future[Any]]:
        """Send a request; return its number, and the future of its result.

        Raises:
            AgentSetupError: The environment cannot be loaded.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self._send(request)

    def cancel(self, number: int) -> None:
        """End a request whose result nobody wants."""
        with self._lock:
            if self._pending.pop(number, None) is not None:
                self._write({"id": number, "do": "cancel"})

    def close(self) -> None:
        """End the process; a later request starts another."""
        with self._lock:
            self._process = None
            if self._end is not None:
                self._end()

    def _start(self) -> None:
        if self._end is not None:
            self._end()
        settings = self._settings
        # Open as long as the process, for its last words.
        log = tempfile.TemporaryFile()  # noqa: SIM115
        python = settings.python or _isolated_python()
        try:
            process = subprocess.Popen(
                [python, "-P", str(_HOST)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Modules of this process must not come before those of the other.
                env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
                # Ctrl-C is for the owner, which ends the process when it ends.
                start_new_session=True,
            )
        except OSError as error:
            log.close()
            raise AgentSetupError(
                f"python must be an interpreter that can be run: {python!r}: "
                f"{error.strerror}"
            ) from error
        pending: _Pending = {}
        self._end = weakref.finalize(self, _end, process, log)
        self._process, self._pending = process, pending
        threading.Thread(
            target=_read, args=(process, pending, log), name="verifiers", daemon=True
        ).start()
        try:
            self._load()
        except AgentSetupError:
            self._process = None
            self._end()
            raise

    def _load(self) -> None:
        settings = self._settings
        asked = {"do": "load", "env": settings.env, "args": settings.args}
        _, future = self._send({**asked, "folder": settings.folder})
        try:
            found = future.result(settings.start_s)
        except TimeoutError:
            raise AgentSetupError(
                f"the environment {settings.env!r} of verifiers was not loaded within "
                f"{settings.start_s:g} s (start_s)"
            ) from None
        except AgentError as error:
            raise AgentSetupError(
                f"the environment {settings.env!r} of verifiers cannot be loaded: "
                f"{error}; install it in the environment of python, or name its folder"
            ) from error
        if found["needs_groups"]:
            raise AgentSetupError(
                f"the environment {settings.env!r} of verifiers must reward each "
                "rollout by itself: its rubric compares those of a group"
            )

    def _send(self, request: Mapping[str, Any]) -> tuple[int, Future[Any]]:
        number, future = next(self._numbers), Future[Any]()
        self._pending[number] = future
        self._write({"id": number, **request})
        return number, future

    def _write(self, request: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # Its end is told by the reader, to all that wait.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self._process.stdin.flush()


def _read(process: subprocess.Popen[bytes], pending: _Pending, log: IO[bytes]) -> None:
    """Settle futures until the process ends."""
    assert process.stdout is not None
    for line in process.stdout:
        reply = json.loads(line)
        future = pending.pop(reply["id"], None)
        if future is None or not _is_awaited(future):
            continue
        if "error" in reply:
            future.set_exception(AgentError(reply["error"]))
        else:
            future.set_result(reply["result"])
    code, said = process.wait(), _tail(log)
    problem = f"the process of verifiers ended with exit code {code}"
    while pending:
        with suppress(KeyError):
            _, future = pending.popitem()
            if _is_awaited(future):
                told = f"{problem}: {said}" if said else problem
                future.set_exception(AgentError(told))


def _is_awaited(future: Future[Any]) -> bool:
    """Return whether a future may be settled; from then on nobody can cancel it."""
    # One that was cancelled a moment ago is still among those that wait, and an error
    # here would end the thread, for which all others wait.
    return future.set_running_or_notify_cancel()


def _tail(log: IO[bytes]) -> str:
    # It may have been closed by the owner.
    with suppress(ValueError, OSError):
        size = os.fstat(log.fileno()).st_size
        part = os.pread(log.fileno(), _SHOWN_BYTES, max(0, size - _SHOWN_BYTES))
        return part.decode(errors="replace").strip()
    return ""


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


def _isolated_python() -> str:
    environment = ExtraEnvironment(
        "rl-envs", "verifiers", imports=("verifiers",), preflight_deadline_s=60.0
    )
    try:
        prepared = environment.prepare()
    except ActorEnvironmentError as error:
        raise AgentSetupError(
            f"{error}; or name a Python that has verifiers (env.settings.python)"
        ) from error
    [python] = shlex.split(prepared.runtime_env.get("py_executable", sys.executable))
    return python
