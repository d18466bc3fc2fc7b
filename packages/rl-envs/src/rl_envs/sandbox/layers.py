"""Layers of confinement for the calling process, from rlimits to seccomp.

Only the standard library is imported, because the zygote, a standalone script, uses
this file. Each function acts on the calling process irrevocably and raises OSError if
the kernel refuses, so that a program never starts with a layer missing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterable

__all__ = [
    "confine_files",
    "confine_syscalls",
    "drop_uid",
    "end_with_parent",
    "enter_namespaces",
    "make_file_rules",
    "prctl",
    "set_limits",
    "supports_seccomp",
]

_LIBC = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 1 << 18
_MAX_THREADS = 32
_MAX_FILES = 64


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
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        # An unprivileged process cannot raise a hard limit that the caller already had.
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def enter_namespaces(scratch: str, size_bytes: int, uid: int, network: bool) -> None:
    """Enter new namespaces with an empty tmpfs on `scratch`.

    Args:
        scratch: A folder; other processes still see it empty.
        size_bytes: Maximum size of the tmpfs.
        uid: Owner of the tmpfs if this process is root.
        network: Also enter a network namespace, which has no interface that is up.

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
    kind = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
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
    _check(_LIBC.capset(header, bytes(24)), "capset")


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1 << 2, 1 << 3
# Number of file rights known to each ABI version; unknown bits are rejected.
_LANDLOCK_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
_LANDLOCK_NEWEST_BITS = 16
_LANDLOCK_TCP, _LANDLOCK_SCOPES = 3, 3
_LANDLOCK_TCP_SINCE, _LANDLOCK_SCOPES_SINCE = 4, 6


def make_file_rules(readable: Iterable[str], writable: str | None) -> int:
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
    """Apply the rules returned by `make_file_rules`, and close them.

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
    os.close(handle)
    _check(added, f"landlock_add_rule {path}")


# System call numbers of x86_64. All others fail with EPERM.
_ALLOWED = (
    # Operations on open files, and opening files for reading.
    *(0, 1, 3, 4, 5, 6, 7, 8, 17, 18, 19, 20, 21, 22, 23, 32, 33, 72, 78, 79, 80, 81),
    *(89, 217, 221, 257, 262, 267, 269, 270, 271, 292, 293, 295, 332, 436, 439),
    # Memory, time, signals to itself, threads, waiting.
    *(9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 28, 34, 35, 36, 37, 38, 39, 60, 63),
    *(95, 96, 97, 98, 99, 100, 102, 104, 107, 108, 110, 111, 115, 118, 120, 121, 124),
    *(127, 128, 130, 131, 160, 186, 201, 202, 204, 218, 219, 228, 229, 230, 231),
    *(213, 232, 233, 273, 274, 281, 283, 284, 286, 287, 289, 290, 291, 318, 324, 334),
    # Reading and writing a connected pair of sockets, which asyncio needs.
    *(44, 45, 48, 51, 52, 54, 55),
)
_MAKES_FILES = (76, 77, 74, 75, 82, 83, 84, 86, 87, 88, 258, 263, 264, 265, 266, 316)
_OPEN, _OPENAT = 2, 257
_CLONE, _CLONE3, _OPENAT2 = 56, 435, 437
_KILL, _TGKILL, _IOCTL, _SOCKETPAIR, _PRLIMIT = 62, 234, 16, 53, 302
_CLONE_THREAD = 0x10000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0x400000
# isatty, window size, and flags of a file descriptor; none of them reaches a device.
_IOCTLS = (0x5401, 0x5413, 0x5421, 0x5450, 0x5451)
_STREAM_PAIRS = (1, 1 | 0x800, 1 | 0x80000, 1 | 0x80800)
_ARCH_X86_64 = 0xC000003E
_EPERM, _EACCES, _ENOSYS = 1, 13, 38
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x50000, 0x80000000
_NUMBER, _ARCH = 0, 4

_Code = tuple[int, int, int, int]


def supports_seccomp() -> bool:
    """Return True if the table of system calls is for this machine."""
    return platform.machine() == "x86_64"


def confine_syscalls(writable: bool) -> None:
    """Allow only listed system calls: no processes, programs, sockets or signals.

    Args:
        writable: Allow files to be opened for writing, created and removed.

    Raises:
        OSError: The kernel refuses, or the machine is not x86_64.
    """
    if not supports_seccomp():
        raise OSError(_ENOSYS, f"seccomp: no table for {platform.machine()}")
    prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    codes = _filter(os.getpid(), writable)
    # Bound to a name: `program` holds only its address, so it must outlive the call.
    body = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *c) for c in codes))
    program = struct.pack("HxxxxxxQ", len(codes), ctypes.addressof(body))
    _check(_LIBC.prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "PR_SET_SECCOMP")


def _filter(pid: int, writable: bool) -> list[_Code]:
    codes: list[_Code] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCH_X86_64),
        # The 32-bit ABI numbers its calls differently, so the list would allow others.
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if writable:
        for number in (_OPEN, *_MAKES_FILES):
            codes += _when(number, [(_RETURN, 0, 0, _ALLOW)])
    else:
        codes += _when(_OPEN, _unless_bits(1, _WRITING))
        codes += _when(_OPENAT, _unless_bits(2, _WRITING))
    codes += _when(_CLONE, _if_bits(0, _CLONE_THREAD))
    codes += _when(_KILL, _if_one_of(0, (pid,)))
    codes += _when(_TGKILL, _if_one_of(0, (pid,)))
    codes += _when(_PRLIMIT, _if_one_of(0, (0, pid)))
    codes += _when(_IOCTL, _if_one_of(1, _IOCTLS))
    # A datagram socket, even one of a pair, can send to any address.
    codes += _when(_SOCKETPAIR, _if_one_of(1, _STREAM_PAIRS))
    # Their arguments are behind a pointer, which a filter cannot read. On ENOSYS the C
    # library falls back to clone and openat, whose arguments are in registers.
    for number in (_CLONE3, _OPENAT2):
        codes += _when(number, [(_RETURN, 0, 0, _ERRNO | _ENOSYS)])
    for number in _ALLOWED:
        codes += _when(number, [(_RETURN, 0, 0, _ALLOW)])
    return [*codes, (_RETURN, 0, 0, _ERRNO | _EPERM)]


def _when(number: int, body: list[_Code]) -> list[_Code]:
    return [(_EQUAL, 0, len(body), number), *body]


def _load_argument(index: int) -> _Code:
    return (_LOAD, 0, 0, 16 + 8 * index)


def _if_bits(argument: int, bits: int) -> list[_Code]:
    return [
        _load_argument(argument),
        (_ANY_BIT, 0, 1, bits),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]


def _unless_bits(argument: int, bits: int) -> list[_Code]:
    return [
        _load_argument(argument),
        (_ANY_BIT, 0, 1, bits),
        (_RETURN, 0, 0, _ERRNO | _EACCES),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _if_one_of(argument: int, values: Iterable[int]) -> list[_Code]:
    codes = [_load_argument(argument)]
    for value in values:
        codes += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*codes, (_RETURN, 0, 0, _ERRNO | _EPERM)]
