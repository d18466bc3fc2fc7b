"""`SandboxPool`: runs a model's programs in confined, freshly forked processes.

```
run --a free slot--> zygote.py (own uid) --fork, confinement.py--> a Python program
                                         --fork, commands.py--> bwrap --> any command
        no reply in time, or the zygote dies: status "sandbox", a new zygote takes over
```
"""

from __future__ import annotations

import base64
import json
import os
import queue
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_envs.errors import SandboxError
from rl_envs.sandbox.interface import Sandbox
from rl_envs.sandbox.runs import (
    Command,
    Program,
    SandboxLevel,
    SandboxLimits,
    SandboxResult,
)

__all__ = ["SandboxPool", "reachable_level"]

# Generous, since a zygote imports its modules and probes each level on a machine that
# may be starting many at once.
_START_S = 60.0
# The zygote enforces the program's limit; this margin covers its own work around it, so
# that only a broken zygote is given up.
_GRACE_S = 10.0
_END_S = 60.0
# Outside the ranges of Debian and systemd. Two pools rarely share a uid.
_FIRST_UID, _NUM_UIDS = 61184, 4000
_PRELOAD = (
    *("array", "ast", "asyncio", "base64", "bisect", "collections", "copy", "csv"),
    *("cmath", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions"),
    *("functools", "hashlib", "heapq", "io", "itertools", "json", "math", "numbers"),
    *("operator", "pickle", "pprint", "queue", "random", "re", "statistics", "string"),
    *("struct", "textwrap", "threading", "time", "typing", "unicodedata", "uuid"),
    *("ctypes", "socket", "subprocess", "encodings.latin_1", "encodings.ascii"),
)


class SandboxPool(Sandbox):
    """Runs untrusted programs on this machine, several at a time.

    No program runs in the calling process, and none sees anything left by another.
    Python programs run in forks of a process that has loaded the standard library.
    Commands, and so programs in other languages, run under bubblewrap where it is
    installed, at level `NAMESPACES` whatever level Python programs reach. Zygotes are
    local processes; close the pool, or use it as a context manager.

    Args:
        num_slots: Number of programs that run at the same time.
        level: Minimum level; the pool refuses to run below it. It cannot reach
            `CONTAINER`.
        network_namespace: Also enter a network namespace (slower; sockets are forbidden
            without it, too).
        preload: Modules loaded before a program starts, beside common ones of the
            standard library; they must be importable without site-packages.

    Raises:
        SandboxError: The level cannot be reached here; the message says why.
    """

    def __init__(
        self,
        num_slots: int = 1,
        *,
        level: SandboxLevel = SandboxLevel.LANDLOCK,
        network_namespace: bool = True,
        preload: Sequence[str] = (),
    ) -> None:
        if num_slots < 1:
            raise SandboxError(f"num_slots must be at least 1: got {num_slots}")
        self.num_slots = num_slots
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._slots = [
            _Slot(number, network_namespace, (*_PRELOAD, *preload))
            for number in range(num_slots)
        ]
        try:
            # Launch all before waiting for any: they start in parallel.
            for slot in self._slots:
                slot.launch()
            for slot in self._slots:
                slot.wait_until_up(level)
                self._free.put(slot)
        except BaseException:
            self.close()
            raise
        # What holds for every program, whichever slot it gets.
        self.level = min(slot.level for slot in self._slots)
        self._asked = level

    def run_command(
        self, command: Command, limits: SandboxLimits | None = None
    ) -> SandboxResult:
        """Run a command under bubblewrap, after waiting for a free slot.

        If bubblewrap is missing or fails, the status is `sandbox` and `stderr` says
        why.

        Args:
            command: What to run.
            limits: Its resource limits.

        Raises:
            SandboxError: The pool is closed, or a failed slot cannot be restarted.
        """
        files = {
            name: base64.b64encode(data).decode()
            for name, data in command.files.items()
        }
        request = {"argv": command.argv, "files": files, "stdin": command.stdin}
        return self._ask(request, limits or SandboxLimits())

    def run_built(
        self, program: Program, built: bytes, limits: SandboxLimits
    ) -> SandboxResult:
        """Run a program: of Python in a fork, of other languages as a command."""
        if program.language != "python":
            return super().run_built(program, built, limits)
        return self._ask({"code": program.code, "stdin": program.stdin}, limits)

    def missing_languages(self) -> dict[str, str]:
        """Return, of each language, why it is not there; Python always is."""
        return {**super().missing_languages(), "python": ""}

    def _check(self, name: str) -> None:
        if name != "python":
            # Looking for others costs a command.
            super()._check(name)

    def _ask(self, request: Mapping[str, Any], limits: SandboxLimits) -> SandboxResult:
        self._check_open()
        slot = self._free.get()
        try:
            with slot.in_use:
                # Again: a zygote started after `close` would never end.
                self._check_open()
                return self._ask_slot(slot, request, limits)
        finally:
            self._free.put(slot)

    def _ask_slot(
        self, slot: _Slot, request: Mapping[str, Any], limits: SandboxLimits
    ) -> SandboxResult:
        try:
            # The level asked for, not the one reached at first: a restart must not fail
            # because the machine now allows less than the maximum.
            if not slot.is_up:
                slot.launch()
                slot.wait_until_up(self._asked)
            own = {name: getattr(limits, name) for name in limits.__slots__}
            return slot.ask({**request, **own}, limits.time_s)
        except BaseException:
            # As by Ctrl-C: the reply is still to come, and the next program would get
            # it for its own.
            slot.end()
            raise

    def _check_open(self) -> None:
        if not self._slots:
            raise SandboxError("the sandbox is closed; create another SandboxPool")

    def close(self) -> None:
        """Stop all processes and remove the scratch folders."""
        # Emptied first, so that a call that comes meanwhile finds the pool closed.
        slots, self._slots = self._slots, []
        # All first: a call in another thread gives its slot back once that is dead.
        for slot in slots:
            slot.kill()
        for slot in slots:
            with slot.in_use:
                slot.end()


def reachable_level(*, network_namespace: bool = True) -> SandboxLevel:
    """Return the highest level available here, found by starting an empty sandbox.

    Args:
        network_namespace: See `SandboxPool`.

    Raises:
        SandboxError: Not even the lowest level is available; the message says why.
    """
    slot = _Slot(0, network_namespace, ())
    try:
        slot.launch()
        slot.wait_until_up(SandboxLevel.SECCOMP)
        return slot.level
    finally:
        slot.end()


class _Slot:
    """One zygote; used by one thread at a time."""

    def __init__(self, number: int, network: bool, preload: Sequence[str]) -> None:
        # Spread by process and slot: the kernel counts threads per uid, so slots of one
        # uid would share their limit.
        self._uid = _FIRST_UID + (os.getpid() * 16 + number) % _NUM_UIDS
        self._network = network
        self._preload = preload
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch = ""
        self.level = SandboxLevel.SECCOMP
        # Held during a call, whose pipes must not be closed by another thread.
        self.in_use = threading.RLock()

    @property
    def is_up(self) -> bool:
        return self._process is not None

    def launch(self) -> None:
        self._scratch = tempfile.mkdtemp(prefix="sandbox-")
        # Other uids must be able to enter it; the tmpfs mounted here is private.
        os.chmod(self._scratch, 0o755)
        settings = {
            "scratch": self._scratch,
            "uid": self._uid,
            "network": self._network,
            "preload": list(self._preload),
        }
        script = Path(__file__).with_name("zygote.py")
        # An empty environment: programs cannot read variables that the zygote lacks.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            bufsize=0,
        )

    def wait_until_up(self, asked: SandboxLevel) -> None:
        reply = self._read(_START_S)
        if reply is None:
            self.end()
            raise SandboxError(
                f"a process of the sandbox did not start within {_START_S:g} s; check "
                "that each module of preload can be imported without site-packages"
            )
        name = reply["level"].upper()
        reached = SandboxLevel[name] if name else None
        if reached is None or reached < asked:
            self.end()
            raise SandboxError(
                f"the sandbox must reach level {asked.name}: it reaches "
                f"{'none' if reached is None else reached.name} here "
                f"({reply['problem']}); ask for a lower level or change the machine"
            )
        self.level = reached

    def ask(self, request: dict[str, Any], time_s: float) -> SandboxResult:
        data = json.dumps(request).encode()
        reply = None
        if self._write(struct.pack("I", len(data)) + data):
            reply = self._read(time_s + _GRACE_S)
        if reply is None:
            # A late reply would be taken for the next program's; start over instead.
            self.end()
            return SandboxResult("sandbox", "", "the zygote failed", None, None, 0.0, 0)
        return SandboxResult(**reply)

    def _write(self, data: bytes) -> bool:
        process = self._process
        if process is None or process.stdin is None:
            return False
        view = memoryview(data)
        try:
            while view:
                # An unbuffered pipe may take only part of the data.
                view = view[process.stdin.write(view) or 0 :]
        except BrokenPipeError:
            return False
        return True

    def _read(self, limit_s: float) -> dict[str, Any] | None:
        until = time.monotonic() + limit_s
        head = self._read_exactly(4, until)
        body = head and self._read_exactly(struct.unpack("I", head)[0], until)
        if not body:
            return None
        reply: dict[str, Any] = json.loads(body)
        return reply

    def _read_exactly(self, size: int, until: float) -> bytes | None:
        process, data = self._process, b""
        if process is None or process.stdout is None:
            return None
        handle = process.stdout.fileno()
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while len(data) < size:
            left_s = until - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return None
            part = os.read(handle, size - len(data))
            if not part:
                return None
            data += part
        return data

    def kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            # Its program dies with it (PDEATHSIG).
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait(_END_S)
            shutil.rmtree(self._scratch, ignore_errors=True)
