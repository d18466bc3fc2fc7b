"""`ContainerSandbox`: each program in an OCI container of its own.

```
run --temporary folder (read-only) + limits--> docker run / podman run --> the program
        no end in time: kill, remove          inspect: out of memory?
```
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_envs.errors import SandboxError
from rl_envs.sandbox.child import Bounds, Ended, collect, describe
from rl_envs.sandbox.interface import Sandbox
from rl_envs.sandbox.runs import (
    Command,
    SandboxLevel,
    SandboxLimits,
    SandboxResult,
)

__all__ = ["ContainerSandbox"]

_ENGINES = ("docker", "podman")
_NOBODY = "65534:65534"
_MAX_TASKS = 64
_MAX_FILES = 256
_KILLED = 128 + 9
_FIRST_SIGNAL, _LAST_SIGNAL = 129, 192
_ENGINE_FAILED = 125
# For the engine's own short calls: a service that hangs must not hang the run.
_CALL_S = 60.0
# The program is given here; the scratch folder is a copy, so that it may be written. No
# image has these folders: podman would give the scratch folder the modes of its own.
_GIVEN, _WORK = "/sandbox-given", "/sandbox-work"
# The shell stays the first process, which nothing in its namespace can kill: some
# `timeout`s become the program, and let another process kill it.
_BEGIN = f'cp -r {_GIVEN}/. {_WORK}/ && timeout -s KILL "$0" "$@"; exit $?'


class ContainerSandbox(Sandbox):
    """Runs each program in a new container, which is removed afterwards.

    It has no network, no capabilities and no writable file but its scratch folder,
    which lies in memory; memory, processes and open files are bounded for all of its
    processes together. The image must have `sh`, `cp` and `timeout`, and what the
    programs need. The engine must share this machine's files.

    Args:
        image: Name of the image, which must be there already: nothing is pulled.
        num_slots: Programs that run at the same time.
        level: Refuse to run below this level.
        engine: The command to call, `docker` or `podman`, or a path; None: the first of
            them that is installed.
        start_s: Seconds that a container may take to start, beside a program's limit.
        options: Further options of `run`, such as `--runtime=runsc`.

    Raises:
        SandboxError: There is no engine or no image, or no container runs.
    """

    def __init__(
        self,
        image: str,
        num_slots: int = 1,
        *,
        level: SandboxLevel = SandboxLevel.CONTAINER,
        engine: str | None = None,
        start_s: float = 30.0,
        options: Sequence[str] = (),
    ) -> None:
        if num_slots < 1:
            raise SandboxError(f"num_slots must be at least 1: got {num_slots}")
        self.num_slots = num_slots
        self.level = SandboxLevel.CONTAINER
        if level > self.level:
            raise SandboxError(
                f"a container reaches level {self.level.name}: got {level.name}"
            )
        self._image = image
        self._start_s = start_s
        self._options = tuple(options)
        self._engine = _find_engine(engine)
        self._own: tuple[str, ...] = ()
        if "podman" in self._call("--version").stdout:
            # Else it puts writable folders without a limit into a read-only container.
            self._own = ("--read-only-tmpfs=false",)
        # Engines leave files in the folder that they are called in.
        self._folder = tempfile.TemporaryDirectory(prefix="sandbox-engine-")
        self._free = threading.BoundedSemaphore(num_slots)
        self._is_closed = False
        self._running: set[str] = set()
        try:
            self._check_image()
            self._try_it()
        except BaseException:
            self.close()
            raise

    def run_command(
        self, command: Command, limits: SandboxLimits | None = None
    ) -> SandboxResult:
        """Run a command line in a new container; wait for a free slot before.

        Raises:
            SandboxError: It is closed.
        """
        allowed = limits or SandboxLimits()
        with self._free:
            if self._is_closed:
                raise SandboxError(
                    "the sandbox is closed; make another ContainerSandbox"
                )
            name = f"rl-sandbox-{uuid.uuid4().hex}"
            self._running.add(name)
            try:
                with _folder_of(command) as folder:
                    return self._run(name, folder, command, allowed)
            finally:
                # Not `run --rm`: the container must still exist when it is asked why it
                # was killed.
                self._call("rm", "-f", name)
                self._running.discard(name)

    def close(self) -> None:
        """Remove the containers that run; it may be called again."""
        self._is_closed = True
        # A copy: threads whose containers end remove their names meanwhile.
        for name in list(self._running):
            self._call("rm", "-f", name)
        self._folder.cleanup()

    def _run(
        self, name: str, folder: str, command: Command, limits: SandboxLimits
    ) -> SandboxResult:
        began = time.monotonic()
        with tempfile.TemporaryFile() as stdin:
            stdin.write(command.stdin.encode())
            stdin.seek(0)
            ended, code = _watched(
                self._arguments(name, folder, command, limits),
                stdin.fileno(),
                # The engine's start is not the program's time: `timeout` inside the
                # container holds the program's own limit, this one is the backstop.
                Bounds(began + self._start_s + limits.time_s, limits.output_bytes),
                self._folder.name,
            )
        took_s = time.monotonic() - began
        # The code by which engines report their own failure; the program did not run.
        if code == _ENGINE_FAILED and not ended.over:
            told = ended.stderr.decode("utf-8", "replace")
            return SandboxResult("sandbox", "", told, None, None, took_s, 0)
        if not ended.over and code == _KILLED:
            ended = Ended(
                ended.stdout, ended.stderr, self._why_killed(name, limits, took_s)
            )
        if _FIRST_SIGNAL <= code <= _LAST_SIGNAL:
            code = 128 - code
        return SandboxResult(**describe(ended, code, took_s, 0))

    def _why_killed(self, name: str, limits: SandboxLimits, took_s: float) -> str:
        """Return the limit for which a container was killed; empty: none of them."""
        state = self._call("inspect", "--format", "{{.State.OOMKilled}}", name)
        if state.stdout.strip() == "true":
            return "memory"
        return "time" if took_s >= limits.time_s else ""

    def _arguments(
        self, name: str, folder: str, command: Command, limits: SandboxLimits
    ) -> list[str]:
        memory = str(limits.memory_bytes)
        scratch = f"size={limits.scratch_bytes},mode=1777"
        return [
            *(self._engine, "run", "--name", name, "--interactive", "--pull", "never"),
            *("--network", "none", "--read-only", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges", "--user", _NOBODY),
            # Equal values: without the second, a container may use as much swap again.
            *("--memory", memory, "--memory-swap", memory),
            *("--pids-limit", str(_MAX_TASKS)),
            *("--ulimit", f"nofile={_MAX_FILES}", "--ulimit", "core=0"),
            *("--ulimit", f"fsize={limits.scratch_bytes}"),
            *("--ulimit", f"cpu={int(limits.time_s) + 2}"),
            *("--tmpfs", f"{_WORK}:rw,exec,nosuid,nodev,{scratch}"),
            *("--volume", f"{folder}:{_GIVEN}:ro", "--workdir", _WORK),
            *("--env", f"HOME={_WORK}", "--env", f"TMPDIR={_WORK}"),
            *("--entrypoint", "sh"),
            *self._own,
            *self._options,
            *(self._image, "-c", _BEGIN, f"{limits.time_s:g}", *command.argv),
        ]

    def _check_image(self) -> None:
        found = self._call("image", "inspect", "--format", "{{.Id}}", self._image)
        if found.returncode:
            raise SandboxError(
                f"image {self._image!r} cannot be used with {self._engine}: "
                f"{found.stderr.strip()[-300:]}; pull or build it, and start the "
                "engine's service"
            )

    def _try_it(self) -> None:
        probe = self.run_command(
            Command(("sh", "-c", "echo ready")), SandboxLimits(time_s=30.0)
        )
        if probe.stdout != "ready\n":
            raise SandboxError(
                f"a container of image {self._image!r} must run `sh`: it ended by "
                f"{probe.status}: {probe.stderr.strip()[-300:]}"
            )

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Call the engine; what fails or hangs has a return code other than 0."""
        line = [self._engine, *arguments]
        try:
            return subprocess.run(
                line,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_CALL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(line, 1, "", str(error))


def _find_engine(given: str | None) -> str:
    names = _ENGINES if given is None else (given,)
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise SandboxError(
            f"a container engine must be installed: found no {' and no '.join(names)}"
        )
    return found


@contextlib.contextmanager
def _folder_of(command: Command) -> Iterator[str]:
    """Write the files of a command into a temporary folder that all may read."""
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        root = Path(folder)
        for name, data in command.files.items():
            # Resolved before the check, since `..` in a name may leave the folder.
            path = (root / name).resolve()
            if not path.is_relative_to(root.resolve()):
                raise SandboxError(
                    f"a file must lie in the scratch folder: got {name!r}"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            # The container's user is nobody, and any of the files may be a program.
            path.chmod(0o755)
        root.chmod(0o755)
        yield folder


def _watched(
    line: Sequence[str], stdin: int, bounds: Bounds, folder: str
) -> tuple[Ended, int]:
    """Run a command of this machine up to bounds; return its output and exit code."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    try:
        process = subprocess.Popen(
            line, stdin=stdin, stdout=out_write, stderr=err_write, cwd=folder
        )
    except BaseException:
        os.close(out_read)
        os.close(err_read)
        raise
    finally:
        # This process's copies: otherwise the pipes would never reach their end.
        os.close(out_write)
        os.close(err_write)
    ended = collect(process.pid, (out_read, err_read), bounds)
    return ended, process.wait(_CALL_S)
