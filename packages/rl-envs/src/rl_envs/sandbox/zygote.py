"""One slot of the sandbox: a process that forks a confined child for each program.

`SandboxPool` runs it as a script, with an empty environment; it never runs a program
itself. Requests and replies are JSON objects, each preceded by its length (4 bytes).
The program has no file descriptor of this channel, only its own standard streams.

A request with `argv` is a command, which `commands` runs under bubblewrap; any other is
a Python program, which runs in a fork of this process.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
import os
import signal
import struct
import sys
import sysconfig
import time
import traceback
import types
from typing import Any, BinaryIO

# Isolated mode (-I) leaves the script's folder out of the path.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import child  # type: ignore[import-not-found,unused-ignore]
import commands  # type: ignore[import-not-found,unused-ignore]
import confinement  # type: ignore[import-not-found,unused-ignore]
import syscall_filters  # type: ignore[import-not-found,unused-ignore]

_LEVELS = ("seccomp", "landlock", "namespaces")
_CANNOT_CONFINE = 120
_READY = 3


class _Zygote:
    def __init__(self, scratch: str, uid: int, network: bool) -> None:
        self.scratch = scratch
        self.uid = uid
        self.network = network
        self.is_root = os.geteuid() == 0
        paths = sysconfig.get_paths()
        self.readable = [
            *{paths["stdlib"], paths["platstdlib"]},
            *("/lib", "/lib64", "/usr/lib", "/dev/null", "/dev/urandom"),
        ]
        self.level = ""

    def probe(self) -> str:
        """Find the highest level that works here; return why higher ones do not."""
        problem = ""
        # From the top: each level is proved by running a program under it, not by
        # asking the kernel what it supports.
        for level in reversed(_LEVELS):
            self.level = level
            reply = self.run(
                {
                    "code": "print(2)",
                    "stdin": "",
                    "time_s": 30.0,
                    "memory_bytes": 1 << 30,
                    "output_bytes": 1000,
                    "scratch_bytes": 1 << 20,
                }
            )
            if reply["status"] == "ok" and reply["stdout"] == "2\n":
                return problem
            # The first reason is kept, as it says why the highest level is out of
            # reach.
            problem = problem or str(reply["stderr"]) or str(reply["status"])
        self.level = ""
        return problem

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        # A memory file, not a pipe: no writer is needed beside the program, and a long
        # input cannot block. Sealed, as the program could write to it otherwise.
        stdin = child.sealed(request["stdin"].encode(), "stdin")
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        ready_read, ready_write = os.pipe()
        parent = os.getpid()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child.become([stdin, out_write, err_write, ready_write])
            self._run_confined(request, parent)
        for handle in (stdin, out_write, err_write, ready_write):
            os.close(handle)
        bounds = child.Bounds(began + request["time_s"], request["output_bytes"])
        ended = child.collect(pid, (out_read, err_read), bounds)
        _, wait_status, usage = os.wait4(pid, 0)
        reply: dict[str, Any] = child.describe(
            ended,
            os.waitstatus_to_exitcode(wait_status),
            time.monotonic() - began,
            usage.ru_maxrss << 10,
        )
        # The byte arrives only after all layers are on; an empty read means that the
        # child ended before.
        if not os.read(ready_read, 1):
            # The program never started, so its exit code says nothing about it.
            reply["status"] = "sandbox"
        os.close(ready_read)
        return reply

    def _run_confined(self, request: dict[str, Any], parent: int) -> None:
        try:
            self._confine(request, parent)
        except BaseException as error:
            os.write(2, f"the sandbox cannot be set up: {error}".encode())
            os._exit(_CANNOT_CONFINE)
        # Says that every layer is on. Closed, so that the program keeps nothing open
        # but its standard streams.
        os.write(_READY, b"1")
        os.close(_READY)
        # Nothing below this line is trusted.
        code = 1
        try:
            code = _execute(request["code"])
        finally:
            # The program may have replaced or closed the streams; its exit code still
            # counts.
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            # No atexit handlers or finalizers of the zygote may run in the fork.
            os._exit(code)

    def _confine(self, request: dict[str, Any], parent: int) -> None:
        # Away from the caller's terminal, and from signals sent to its process group.
        os.setsid()
        namespaces = self.level == "namespaces"
        if namespaces:
            confinement.enter_namespaces(
                self.scratch, request["scratch_bytes"], self.uid, self.network
            )
        # Before dropping the uid: Python may live in a home that only root may enter.
        rules = None
        if self.level != "seccomp":
            writable = self.scratch if namespaces else None
            rules = confinement.build_file_rules(self.readable, writable)
        confinement.drop_uid(self.uid)
        # Changing the uid clears the death signal, so set it afterwards.
        confinement.end_with_parent(parent)
        os.chdir(self.scratch if namespaces else "/")
        confinement.set_limits(
            request["memory_bytes"],
            # A backstop only: the zygote enforces the wall-clock limit.
            int(request["time_s"]) + 2,
            request["scratch_bytes"],
            threads=self.is_root,
        )
        if rules is not None:
            confinement.confine_files(rules)
        # Last, because the layers above need calls that it forbids.
        confinement.confine_syscalls(
            syscall_filters.program_filter(os.getpid(), writable=namespaces)
        )


def _execute(code: str) -> int:
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    # A fresh module: the program must not see the zygote's own globals.
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["program"]
    try:
        exec(compile(code, "<program>", "exec"), main.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            # The kernel keeps only the low byte of an exit code.
            return (stop.code or 0) & 0xFF
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _read_exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        # The pool's process is gone.
        sys.exit(0)
    return data


def _main() -> None:
    settings = json.loads(sys.argv[1])
    # Ctrl-C reaches the whole process group; the pool decides when a zygote ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = open(0, "rb", closefd=False), open(1, "wb", closefd=False)  # noqa: SIM115

    def say(reply: dict[str, Any]) -> None:
        data = json.dumps(reply).encode()
        sink.write(struct.pack("I", len(data)) + data)
        sink.flush()

    for name in settings["preload"]:
        # Once here: each fork then has them loaded, instead of importing them again.
        importlib.import_module(name)
    # Usually defined by the module `site`, which is not loaded here.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    zygote = _Zygote(settings["scratch"], settings["uid"], settings["network"])
    runner = commands.CommandRunner(settings["scratch"], settings["uid"])
    # Collecting in a child would write to, and so copy, every page it inherits.
    gc.collect()
    gc.freeze()
    problem = zygote.probe()
    say({"level": zygote.level, "problem": problem})
    while True:
        (size,) = struct.unpack("I", _read_exactly(source, 4))
        request = json.loads(_read_exactly(source, size))
        say(runner.run(request) if "argv" in request else zygote.run(request))


if __name__ == "__main__":
    _main()
