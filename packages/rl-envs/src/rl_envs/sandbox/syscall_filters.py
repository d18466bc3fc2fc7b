"""Filters of system calls, as seccomp takes them; `confinement` installs them.

Only the standard library is imported: the zygote, a script of its own, uses this file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

__all__ = ["command_filter", "program_filter"]

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
# Pipes, processes, programs, waiting, groups, file times and locks, and what loaders
# and engines of other languages ask for.
_FOR_COMMANDS = (
    *(22, 27, 40, 57, 58, 59, 61, 62, 73, 90, 91, 109, 112, 125, 132, 137, 138, 140),
    *(157, 158, 200, 234, 235, 247, 253, 254, 255, 261, 268, 275, 276, 280, 285, 294),
    *(191, 192, 193, 309, 322, 326, 329, 330, 331, 424, 434, 441, 449, 452),
)
_MAKES_FILES = (76, 77, 74, 75, 82, 83, 84, 86, 87, 88, 258, 263, 264, 265, 266, 316)
_OPEN, _OPENAT = 2, 257
_CLONE, _CLONE3, _OPENAT2 = 56, 435, 437
_KILL, _TGKILL, _IOCTL, _SOCKETPAIR, _PRLIMIT = 62, 234, 16, 53, 302
_CLONE_THREAD = 0x10000
# NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_CLONE_NAMESPACES = 0x7E020000
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


def program_filter(pid: int, writable: bool) -> bytes:
    """Return the filter of one Python program: no process, socket or other's signal.

    Args:
        pid: The process that will be confined.
        writable: Files may be opened for writing, made and removed.
    """
    return _packed(_filter(pid, writable))


def command_filter() -> bytes:
    """Return the filter of a command in namespaces of its own.

    It may make processes, run programs and signal what it sees, which is only its own.
    No socket, no tracing, no further namespace, no mount.
    """
    codes = _begin()
    # A new user namespace would give it back all capabilities in there.
    codes += _when(_CLONE, _unless_bits(0, _CLONE_NAMESPACES))
    codes += _when(_IOCTL, _if_one_of(1, _IOCTLS))
    codes += _when(_SOCKETPAIR, _if_one_of(1, _STREAM_PAIRS))
    codes += _falling_back()
    allowed = (*_ALLOWED, *_FOR_COMMANDS, *_MAKES_FILES, _OPEN, _OPENAT, _PRLIMIT)
    for number in allowed:
        codes += _when(number, [(_RETURN, 0, 0, _ALLOW)])
    # Unknown calls fail instead of killing: loaders and runtimes probe for new ones.
    return _packed([*codes, (_RETURN, 0, 0, _ERRNO | _EPERM)])


def _packed(codes: list[_Code]) -> bytes:
    return b"".join(struct.pack("HBBI", *code) for code in codes)


def _begin() -> list[_Code]:
    return [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCH_X86_64),
        # The 32-bit ABI numbers its calls differently, so the list would allow others.
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _falling_back() -> list[_Code]:
    """Return the rules of calls whose arguments a filter cannot read.

    They are behind a pointer. On ENOSYS the C library falls back to clone and openat,
    whose arguments are in registers.
    """
    codes: list[_Code] = []
    for number in (_CLONE3, _OPENAT2):
        codes += _when(number, [(_RETURN, 0, 0, _ERRNO | _ENOSYS)])
    return codes


def _filter(pid: int, writable: bool) -> list[_Code]:
    codes = _begin()
    if writable:
        for number in (_OPEN, *_MAKES_FILES):
            codes += _when(number, [(_RETURN, 0, 0, _ALLOW)])
    else:
        codes += _when(_OPEN, _unless_bits(1, _WRITING))
        codes += _when(_OPENAT, _unless_bits(2, _WRITING))
    # A clone with this flag makes a thread of this process; without it, a new process.
    codes += _when(_CLONE, _if_bits(0, _CLONE_THREAD))
    # It may signal itself only (abort and raise need it), not others of the same uid.
    codes += _when(_KILL, _if_one_of(0, (pid,)))
    codes += _when(_TGKILL, _if_one_of(0, (pid,)))
    codes += _when(_PRLIMIT, _if_one_of(0, (0, pid)))
    codes += _when(_IOCTL, _if_one_of(1, _IOCTLS))
    # A datagram socket, even one of a pair, can send to any address.
    codes += _when(_SOCKETPAIR, _if_one_of(1, _STREAM_PAIRS))
    codes += _falling_back()
    for number in _ALLOWED:
        codes += _when(number, [(_RETURN, 0, 0, _ALLOW)])
    return [*codes, (_RETURN, 0, 0, _ERRNO | _EPERM)]


def _when(number: int, body: list[_Code]) -> list[_Code]:
    # Every body ends in a return, so a call that is not `number` jumps over all of it.
    return [(_EQUAL, 0, len(body), number), *body]


def _load_argument(index: int) -> _Code:
    # The low half of each 64-bit argument; all flags tested here fit in it.
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
