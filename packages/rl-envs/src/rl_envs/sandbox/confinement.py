"""Layers of confinement for the calling process, from rlimits to seccomp.

Only the standard library is imported, because the zygote, a standalone script, uses
this file. Each function acts on the calling process irrevocably and raises OSError if
the kernel refuses, so that a program never starts with a layer missing.
`syscall_filters` builds the filters of seccomp.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterable, Mapping

__all__ = [
    "confine_files",
    "confine_syscalls",
    "drop_uid",
    "end_with_parent",
    "enter_namespaces",
    "build_file_rules",
    "prctl",
    "set_command_limits",
    "set_limits",
    "supports_seccomp",
]

_LIBC = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 1 << 18
# Threads and open files are the kernel's, so the memory limit does not bound them.
_MAX_THREADS = 32
_MAX_FILES = 64
_MAX_COMMAND_TASKS = 64
_MAX_COMMAND_FILES = 256
_ENOSYS = 38


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int, what: str) -> None:
    """Set an attribute of this process in the kernel.

    Raises:
        OSError: The kernel refuses.
    """
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), what)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends.

    Raises:
        OSError: The kernel refuses.
    """
    # SIGKILL, which the program cannot catch or ignore.
    prctl(_PR_SET_PDEATHSIG, 9, "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        # The parent ended before the line above, so no signal will come.
        os._exit(1)


def set_limits(memory_bytes: int, cpu_s: int, file_bytes: int, threads: bool) -> None:
    """Set rlimits, hard and soft.

    Args:
        memory_bytes: Limit of the address space.
        cpu_s: Limit of CPU time, in seconds.
        file_bytes: Limit of the size of a file.
        threads: Also limit threads. The kernel counts them per uid, so only if this
            slot has a uid of its own.
    """
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: _MAX_FILES,
        # A crash must not dump memory to disk, nor the program lock pages or fill
        # queues that outlive it.
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if threads:
        limits[resource.RLIMIT_NPROC] = _MAX_THREADS
    _apply(limits)


def set_command_limits(
    memory_bytes: int, cpu_s: int, file_bytes: int, num_tasks: int
) -> None:
    """Set rlimits for a program of any language and the processes that it makes.

    Memory is that of each process, and does not count address space that is only
    reserved: engines such as V8 reserve gigabytes.

    Args:
        memory_bytes: Of private memory that can be written.
        cpu_s: Seconds of CPU time.
        file_bytes: Size of a file.
        num_tasks: Processes and threads that this uid has already elsewhere.
    """
    _apply(
        {
            # Not RLIMIT_AS: it would count reservations, and V8 would not start.
            resource.RLIMIT_DATA: memory_bytes,
            resource.RLIMIT_CPU: cpu_s,
            resource.RLIMIT_FSIZE: file_bytes,
            resource.RLIMIT_NOFILE: _MAX_COMMAND_FILES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            # The kernel counts tasks per uid, so what the uid runs elsewhere is added.
            resource.RLIMIT_NPROC: num_tasks + _MAX_COMMAND_TASKS,
        }
    )


def _apply(limits: Mapping[int, int]) -> None:
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        # An unprivileged process cannot raise a hard limit that the caller already had.
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # The hard limit too: a soft one could be raised again by the program.
        resource.setrlimit(kind, (limit, limit))


def enter_namespaces(
    scratch: str, size_bytes: int, uid: int, network: bool, *, executable: bool = False
) -> None:
    """Enter new namespaces with an empty tmpfs on `scratch`.

    Args:
        scratch: A folder; other processes still see it empty.
        size_bytes: Maximum size of the tmpfs.
        uid: Owner of the tmpfs if this process is root.
        network: Also enter a network namespace, which has no interface that is up.
        executable: Allow files there to be executed.

    Raises:
        OSError: The kernel refuses.
    """
    flags = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWUTS
    flags |= _CLONE_NEWNET if network else 0
    if os.geteuid() == 0:
        owner = uid
        _check(_LIBC.unshare(flags), "unshare")
    else:
        owner, group = os.geteuid(), os.getegid()
        _check(_LIBC.unshare(flags | _CLONE_NEWUSER), "unshare")
        # The kernel accepts a gid_map from an unprivileged process only after setgroups
        # is denied, hence the order.
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{owner} {owner} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    # Mounts are shared by default: the one below would also appear outside.
    _check(_LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
    options = f"size={size_bytes},nr_inodes=1024,mode=0700,uid={owner}".encode()
    # Limit inodes as well as bytes: empty files use kernel memory, not tmpfs space.
    kind = _MS_NOSUID | _MS_NODEV | (0 if executable else _MS_NOEXEC)
    _check(
        _LIBC.mount(b"tmpfs", os.fsencode(scratch), b"tmpfs", kind, options),
        "mount tmpfs",
    )


def drop_uid(uid: int) -> None:
    """Become `uid` if this process is root, and give up every capability.

    Raises:
        OSError: The kernel refuses.
    """
    if os.geteuid() == 0:
        # Groups first and the uid last: each call needs the privilege that the last
        # drops.
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # The creator of a user namespace has all capabilities in it, even without root.
    header = struct.pack("Ii", 0x20080522, 0)
    # Zeros: no effective, permitted or inheritable capability is left.
    _check(_LIBC.capset(header, bytes(24)), "capset")


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1 << 2, 1 << 3
# Number of file rights known to each ABI version; unknown bits are rejected.
_LANDLOCK_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
_LANDLOCK_NEWEST_BITS = 16
_LANDLOCK_TCP, _LANDLOCK_SCOPES = 3, 3
_LANDLOCK_TCP_SINCE, _LANDLOCK_SCOPES_SINCE = 4, 6


def build_file_rules(readable: Iterable[str], writable: str | None) -> int:
    """Return landlock rules that deny all but some files; TCP and signals if possible.

    Args:
        readable: Files and folders that may be read.
        writable: A folder in which everything but executing a file is allowed.

    Raises:
        OSError: The kernel has no landlock, or refuses.
    """
    version = _check(
        _LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "landlock"
    )
    # Handle every right that this kernel knows: an unhandled one stays allowed.
    rights = (1 << _LANDLOCK_BITS.get(version, _LANDLOCK_NEWEST_BITS)) - 1
    attributes = [rights]
    if version >= _LANDLOCK_TCP_SINCE:
        attributes.append(_LANDLOCK_TCP)
    if version >= _LANDLOCK_SCOPES_SINCE:
        attributes.append(_LANDLOCK_SCOPES)
    packed = struct.pack(f"{len(attributes)}Q", *attributes)
    rules = _check(
        _LIBC.syscall(_LANDLOCK_CREATE, packed, ctypes.c_size_t(len(packed)), 0),
        "landlock_create_ruleset",
    )
    for path in readable:
        _allow(rules, path, _LANDLOCK_READ_FILE | _LANDLOCK_READ_DIR)
    if writable is not None:
        # Bit 0 is the right to execute.
        _allow(rules, writable, rights & ~1)
    return rules


def confine_files(rules: int) -> None:
    """Apply the rules returned by `build_file_rules`, and close them.

    Raises:
        OSError: The kernel refuses.
    """
    # Without it the kernel lets only root restrict itself: a setuid program could
    # otherwise be tricked by what it cannot open.
    prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    _check(_LIBC.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        # The list names folders that only some distributions have, such as /lib64.
        return
    # The kernel rejects rights of folders in a rule for a file.
    if not os.path.isdir(path):
        rights &= _LANDLOCK_READ_FILE
    rule = struct.pack("=Qi", rights, handle)
    added = _LIBC.syscall(_LANDLOCK_ADD, rules, 1, rule, 0)
    # Closed before the result is checked, so that an error leaks no descriptor.
    os.close(handle)
    _check(added, f"landlock_add_rule {path}")


def supports_seccomp() -> bool:
    """Return True if the table of system calls is for this machine."""
    return platform.machine() == "x86_64"


def confine_syscalls(codes: bytes) -> None:
    """Apply a filter of `syscall_filters`.

    Raises:
        OSError: The kernel refuses, or the machine is not x86_64.
    """
    if not supports_seccomp():
        raise OSError(_ENOSYS, f"seccomp: no table for {platform.machine()}")
    prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    # Bound to a name: `program` holds only its address, so it must outlive the call.
    body = ctypes.create_string_buffer(codes)
    program = struct.pack("HxxxxxxQ", len(codes) // 8, ctypes.addressof(body))
    _check(_LIBC.prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "PR_SET_SECCOMP")
