"""Commands of any language, confined by bubblewrap; part of the zygote's process.

```
fork -> own mounts with a bounded scratch folder -> files written -> uid dropped
     -> rlimits -> bwrap: own users, processes, network; read-only programs; seccomp
        -> the command
```
Only the standard library is imported. The command sees the programs of this machine
(`/usr`), its scratch folder, and nothing else. Its processes end with it: the first of
its PID namespace dies, and with it all the others.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from typing import Any

# Isolated mode leaves this folder out of the path, and the package is not importable in
# the zygote.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import child  # type: ignore[import-not-found,unused-ignore]
import confinement  # type: ignore[import-not-found,unused-ignore]
import syscall_filters  # type: ignore[import-not-found,unused-ignore]

__all__ = ["CommandRunner"]

_SEARCHED = "/usr/local/bin:/usr/bin:/bin"
_STATUS, _FILTER = 3, 4
_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_CONFINE = 120
_START_S = 30.0
_END_S = 30.0
_FIRST_SIGNAL, _LAST_SIGNAL = 129, 192
_PAGE = os.sysconf("SC_PAGE_SIZE")
# What a command finds of this machine, beside /usr.
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")


class CommandRunner:
    """Runs commands one after the other.

    Args:
        scratch: A folder on which each command's scratch folder is mounted.
        uid: What commands run as, where this process is root.
    """

    def __init__(self, scratch: str, uid: int) -> None:
        self._scratch = scratch
        self._uid = uid
        self._is_root = os.geteuid() == 0
        self._bwrap = shutil.which("bwrap", path=_SEARCHED)
        # What bwrap leaves is this process's to wait for, as the first process of a
        # container may wait for nobody.
        confinement.prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one command; return the fields of its `SandboxResult`."""
        if self._bwrap is None:
            return _failed(
                "bubblewrap is not installed: no bwrap in " + _SEARCHED, time_s=0.0
            )
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
            return _failed(
                "this kernel does not list the children of a process, without which "
                "their memory cannot be bounded (CONFIG_PROC_CHILDREN)",
                time_s=0.0,
            )
        # Root has a uid per slot, whose only tasks are those of the command.
        num_tasks = 0 if self._is_root else _num_tasks_of(os.geteuid())
        handles = [
            child.sealed(request["stdin"].encode(), "stdin"),
            *(out := os.pipe())[1:],
            *(err := os.pipe())[1:],
            *(status := os.pipe())[1:],
            child.sealed(syscall_filters.command_filter(), "filter"),
        ]
        parent = os.getpid()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child.become(handles)
            self._become_command(request, parent, num_tasks)
        for handle in handles:
            os.close(handle)
        first, memory = _First(status[0]), _Memory(pid, request["memory_bytes"])
        ended = child.collect(
            pid,
            (out[0], err[0]),
            child.Bounds(
                began + request["time_s"],
                request["output_bytes"],
                memory.is_exceeded,
            ),
        )
        _, wait_status = os.waitpid(pid, 0)
        took_s = time.monotonic() - began
        all_gone = first.wait()
        code = os.waitstatus_to_exitcode(wait_status)
        # Something is still alive, or bwrap never started the command: neither is the
        # command's fault.
        if not all_gone or (not ended.over and first.exit_code() is None):
            told = ended.stderr.decode("utf-8", "replace").strip()
            return _failed(told or f"bwrap ended with {code}", time_s=took_s)
        if _FIRST_SIGNAL <= code <= _LAST_SIGNAL:
            # As shells say it.
            code = 128 - code
        reply: dict[str, Any] = child.describe(ended, code, took_s, memory.peak_bytes)
        return reply

    def _become_command(
        self, request: dict[str, Any], parent: int, num_tasks: int
    ) -> None:
        """Turn this process, a fork, into bwrap; it does not return."""
        try:
            os.setsid()
            confinement.enter_namespaces(
                self._scratch,
                request["scratch_bytes"],
                self._uid,
                network=False,
                executable=True,
            )
            confinement.drop_uid(self._uid)
            # Dropping the uid clears it, so it comes after.
            confinement.end_with_parent(parent)
            os.chdir(self._scratch)
            for name, data in request["files"].items():
                _write_file(name, base64.b64decode(data))
            os.chdir("/")
            confinement.set_command_limits(
                request["memory_bytes"],
                int(request["time_s"]) + 2,
                request["scratch_bytes"],
                num_tasks,
            )
            assert self._bwrap is not None
            # An empty environment: nothing of the caller's variables reaches the
            # command.
            os.execve(self._bwrap, self._arguments(request["argv"]), {})
        except BaseException as error:
            os.write(2, f"the sandbox cannot be set up: {error}".encode())
        finally:
            os._exit(_CANNOT_CONFINE)

    def _arguments(self, argv: list[str]) -> list[str]:
        own = [
            *("bwrap", "--unshare-user", "--unshare-ipc", "--unshare-pid"),
            # A kernel may lack cgroup namespaces, and nothing here relies on them.
            *("--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--hostname", "sandbox", "--ro-bind", "/usr", "/usr"),
        ]
        for path in _SYSTEM_FOLDERS:
            if os.path.islink(path):
                # A link into /usr needs no mount of its own.
                own += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                own += ["--ro-bind", path, path]
        for path in _SYSTEM_FILES:
            own += ["--ro-bind-try", path, path]
        return [
            *own,
            *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
            *("--bind", self._scratch, "/work", "--symlink", "work", "/tmp"),
            # The root of bwrap is a folder in memory without a limit.
            *("--remount-ro", "/", "--chdir", "/work"),
            *("--clearenv", "--setenv", "PATH", _SEARCHED, "--setenv", "HOME", "/work"),
            *("--setenv", "TMPDIR", "/work", "--setenv", "LANG", "C.UTF-8"),
            *("--json-status-fd", str(_STATUS), "--seccomp", str(_FILTER)),
            *("--", *argv),
        ]


class _First:
    """The first process of a command's PID namespace, as bwrap reports it."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._text = b""
        self._process: int | None = None
        poll = select.poll()
        poll.register(status, select.POLLIN)
        until = time.monotonic() + _START_S
        # Its number is in the first line, which may come in parts.
        while b"\n" not in self._text:
            left_s = max(until - time.monotonic(), 0.0)
            part = os.read(status, 4096) if poll.poll(left_s * 1000) else b""
            if not part:
                break
            self._text += part
        number = self._value("child-pid")
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                # A pidfd, not the number: it cannot come to mean another process later.
                self._process = os.pidfd_open(number)

    def wait(self) -> bool:
        """End it where it has not ended; return whether it is gone, and all with it."""
        while part := os.read(self._status, 4096):
            self._text += part
        os.close(self._status)
        if self._process is None:
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        # Once the first process of a PID namespace is gone, the kernel has ended all
        # others.
        is_gone = bool(poll.poll(_END_S * 1000))
        os.close(self._process)
        with contextlib.suppress(ChildProcessError):
            # As subreaper this process inherits the orphans; left unreaped, they would
            # pile up as zombies.
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        return is_gone

    def exit_code(self) -> int | None:
        """Return the command's exit code; None: it was not set up, or was killed."""
        return self._value("exit-code")

    def _value(self, key: str) -> int | None:
        for line in self._text.decode("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if key in found:
                    return int(found[key])
        return None


def _write_file(name: str, data: bytes) -> None:
    folder = os.path.dirname(name)
    # Files are written before bwrap confines anything, so a name must not lead outside.
    if os.path.isabs(name) or ".." in name.split("/"):
        raise ValueError(f"a file must lie in the scratch folder: got {name!r}")
    if folder:
        os.makedirs(folder, exist_ok=True)
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o755)
    child.write_all(handle, data)
    os.close(handle)


class _Memory:
    """Private memory of a process and all below it."""

    def __init__(self, pid: int, limit_bytes: int) -> None:
        self._pid, self._limit_bytes = pid, limit_bytes
        self.peak_bytes = 0

    def is_exceeded(self) -> bool:
        """Look at it; return whether it is above the limit."""
        total, waiting = 0, [self._pid]
        while waiting:
            number = waiting.pop()
            # Each may end at any moment.
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{number}/statm") as file:
                    fields = file.read().split()
                # Resident minus shared pages: libraries mapped by many processes count
                # for none.
                total += (int(fields[1]) - int(fields[2])) * _PAGE
                # Each thread has its own list of children.
                for task in os.listdir(f"/proc/{number}/task"):
                    with open(f"/proc/{number}/task/{task}/children") as file:
                        waiting += [int(each) for each in file.read().split()]
        self.peak_bytes = max(self.peak_bytes, total)
        return total > self._limit_bytes


def _num_tasks_of(uid: int) -> int:
    """Return how many processes and threads a uid has: the kernel counts them all."""
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    found += len(os.listdir(f"/proc/{name}/task"))
    return found


def _failed(reason: str, time_s: float) -> dict[str, Any]:
    return {
        "status": "sandbox",
        "stdout": "",
        "stderr": reason,
        "exit_code": None,
        "signal": None,
        "time_s": time_s,
        "memory_bytes": 0,
    }
