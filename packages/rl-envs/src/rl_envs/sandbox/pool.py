"""`SandboxPool`: programs of a model in confined processes that are forked when needed.

```
run --a free slot--> zygote.py (own uid) --fork, layers.py--> the program
        no reply in time, or the zygote's end: status "sandbox", another one takes over
```
"""

from __future__ import annotations

import json
import os
import queue
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from rl_envs.errors import SandboxError
from rl_envs.sandbox.runs import SandboxLevel, SandboxLimits, SandboxResult

__all__ = ["SandboxPool", "reachable_level"]

_START_S = 60.0
_GRACE_S = 10.0
_END_S = 60.0
# Unused by Debian and systemd's static ranges; two pools rarely share one.
_FIRST_UID, _NUM_UIDS = 61184, 4000
_PRELOAD = (
    *("array", "ast", "asyncio", "base64", "bisect", "collections", "copy", "csv"),
    *("cmath", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions"),
    *("functools", "hashlib", "heapq", "io", "itertools", "json", "math", "numbers"),
    *("operator", "pickle", "pprint", "queue", "random", "re", "statistics", "string"),
    *("struct", "textwrap", "threading", "time", "typing", "unicodedata", "uuid"),
    *("ctypes", "socket", "subprocess", "encodings.latin_1", "encodings.ascii"),
)


class SandboxPool:
    """Runs Python programs that are not trusted, several at a time.

    No program runs in the process that asks, and none sees what another left. Zygotes
    are processes of this machine; close the pool, or use it as a context.

    Args:
        num_slots: Programs that run at the same time.
        level: Refuse to run below this level.
        network_namespace: Enter a network namespace also (slower; sockets cannot be
            made without it either).
        preload: Modules that programs find loaded, beside common ones of the standard
            library; they must be importable without site-packages.

    Raises:
        SandboxError: The level cannot be had here; it says why.
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
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._slots = [
            _Slot(number, network_namespace, (*_PRELOAD, *preload))
            for number in range(num_slots)
        ]
        try:
            # All start, then all are waited for.
            for slot in self._slots:
                slot.launch()
            for slot in self._slots:
                slot.wait_until_up(level)
                self._free.put(slot)
        except BaseException:
            self.close()
            raise
        self.level = min(slot.level for slot in self._slots)
        """The level that was reached."""
        self._asked = level

    def run(
        self, code: str, *, stdin: str = "", limits: SandboxLimits | None = None
    ) -> SandboxResult:
        """Run a Python program as a main module; wait for a free slot before.

        Args:
            code: Its text.
            stdin: What it reads.
            limits: What it may use.

        Raises:
            SandboxError: The pool is closed, or a slot that failed does not come up
                again.
        """
        if not self._slots:
            raise SandboxError("the sandbox is closed; make another SandboxPool")
        request = {"code": code, "stdin": stdin}
        limits = limits or SandboxLimits()
        request |= {name: getattr(limits, name) for name in limits.__slots__}
        slot = self._free.get()
        try:
            if not slot.is_up:
                slot.launch()
                slot.wait_until_up(self._asked)
            return slot.ask(request, limits.time_s)
        finally:
            self._free.put(slot)

    def run_all(
        self, programs: Sequence[tuple[str, str]], limits: SandboxLimits | None = None
    ) -> list[SandboxResult]:
        """Run programs, as many at a time as there are slots.

        Args:
            programs: Code and standard input of each.
            limits: What each may use.

        Raises:
            SandboxError: As `run`.
        """
        with ThreadPoolExecutor(max(len(self._slots), 1), "sandbox") as threads:
            return list(
                threads.map(
                    lambda pair: self.run(pair[0], stdin=pair[1], limits=limits),
                    programs,
                )
            )

    def close(self) -> None:
        """End all processes and remove the scratch folders."""
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.end()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def reachable_level(*, network_namespace: bool = True) -> SandboxLevel:
    """Return how far programs can be confined here, by starting an empty sandbox.

    Args:
        network_namespace: See `SandboxPool`.

    Raises:
        SandboxError: Not even the lowest level can be had; it says why.
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
        self._uid = _FIRST_UID + (os.getpid() * 16 + number) % _NUM_UIDS
        self._network = network
        self._preload = preload
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch = ""
        self.level = SandboxLevel.SECCOMP

    @property
    def is_up(self) -> bool:
        return self._process is not None

    def launch(self) -> None:
        self._scratch = tempfile.mkdtemp(prefix="sandbox-")
        # The program's uid finds its tmpfs here, which is of that uid alone.
        os.chmod(self._scratch, 0o755)
        settings = {
            "scratch": self._scratch,
            "uid": self._uid,
            "network": self._network,
            "preload": list(self._preload),
        }
        script = Path(__file__).with_name("zygote.py")
        # An empty environment: what the zygote does not have, no program can read.
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
                f"a process of the sandbox did not come up within {_START_S:g} s; is "
                "each module of preload importable without site-packages?"
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

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            # Its program ends with it (PDEATHSIG).
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait(_END_S)
            shutil.rmtree(self._scratch, ignore_errors=True)
