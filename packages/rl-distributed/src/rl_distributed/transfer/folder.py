"""Messages as files in a folder that sender and receivers see.

```
<folder>/sender.json        the sending process: host, id, whether it has closed
         receiver-<i>.json  the same of a receiving process
         message-<n>.*      message n; renamed to this name once it is whole
         taken-<i>          `Taken` of receiver i
```
A receiver waits for the file of its next message and looks now and then whether the
sender still lives, which can only be known on the same machine.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rl_distributed.errors import DeadlineExceededError, TransferError
from rl_distributed.failures.lock_owner import machine_id
from rl_distributed.process.start_time import started_s

__all__ = [
    "Taken",
    "announce",
    "map_file",
    "own_process",
    "process_is_gone",
    "reason_for_silence",
    "replace_file",
    "taken_in",
    "wait_for",
]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
# The pause grows with the wait: a message may arrive later by this share of it.
_PAUSE_SHARE = 0.1
_WATCH_EVERY_S = 0.25

FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True)
class Taken:
    """The messages that a receiver has taken."""

    next: int = 0
    """The message that it takes next."""
    held: tuple[int, ...] = ()
    """Earlier ones of which it still has tensors, where it says so."""

    def to_text(self) -> str:
        """All numbers as text."""
        return " ".join(map(str, (self.next, *self.held)))


def taken_in(path: Path) -> Taken:
    """Return what a file says; without one, nothing is taken yet."""
    try:
        with open(path, "rb", buffering=0) as file:
            following, *held = map(int, file.readall().split())
    except FileNotFoundError:
        return Taken()
    return Taken(following, tuple(held))


def own_process() -> dict[str, Any]:
    """Return what others need to find out whether this process lives."""
    return {
        "host": socket.gethostname(),
        # Process numbers mean nothing in another container.
        "namespace": os.stat("/proc/self/ns/pid").st_ino,
        "boot": machine_id(),
        "pid": os.getpid(),
        "started_s": started_s(os.getpid()),
        "closed": False,
    }


def process_is_gone(process: dict[str, Any]) -> bool:
    """Whether a process is known to have ended; False where it cannot be known."""
    own = own_process()
    if any(process[key] != own[key] for key in ("host", "namespace")):
        return False
    # The machine was started again since.
    if process.get("boot", own["boot"]) != own["boot"]:
        return True
    try:
        # Process ids are reused; the start time tells the processes apart.
        if abs(started_s(process["pid"]) - process["started_s"]) >= 1.0:
            return True
        # A zombie has ended, but its parent has not collected it yet.
        return psutil.Process(process["pid"]).status() == psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return True


def replace_file(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a small file atomically: readers see all of it or nothing."""
    # Each message costs two of these: a text file takes three times as long.
    part = f"{path.parent}/.{path.name}.part"
    with open(part, "wb", buffering=0) as file:
        left = memoryview(text.encode())
        while left:
            left = left[file.write(left) :]
        if durable:
            os.fsync(file.fileno())
    os.replace(part, path)


def announce(path: Path, *, closed: bool = False) -> None:
    """Write down which process uses an end of the link."""
    replace_file(path, json.dumps({**own_process(), "closed": closed}))


def map_file(path: Path, *, is_private: bool = True) -> mmap.mmap:
    """Return the memory of a file, which stays valid after the file is removed.

    Args:
        path: The file; not an empty one.
        is_private: Writes stay invisible to others: pages are shared with the file
            until they are first written to, and then copied. False: always shared.
    """
    access = mmap.ACCESS_COPY if is_private else mmap.ACCESS_WRITE
    with path.open("rb" if is_private else "r+b") as file:
        return mmap.mmap(file.fileno(), 0, access=access)


def wait_for(
    attempt: Callable[[], FoundT | None],
    watch: Callable[[], str | None],
    what: str,
    deadline_s: float,
) -> FoundT:
    """Try until there is a result.

    Args:
        attempt: Returns the result, or None to be called again.
        watch: Returns why there will never be one, or None. A last attempt follows.
        what: Name of the awaited result, for messages.
        deadline_s: How long to try.

    Raises:
        TransferError: `watch` gave a reason.
        DeadlineExceededError: Nothing came in time.
    """
    began_s = time.monotonic()
    watched_s = began_s
    while True:
        found = attempt()
        if found is not None:
            return found
        now_s = time.monotonic()
        if now_s - watched_s > _WATCH_EVERY_S:
            watched_s = now_s
            reason = watch()
            if reason is not None:
                found = attempt()
                # It may have written its last message just before it ended.
                if found is not None:
                    return found
                raise TransferError(f"{reason} while waiting for {what}")
        if now_s - began_s > deadline_s:
            raise DeadlineExceededError(f"{what} did not come within {deadline_s:g} s")
        pause_s = max(_PAUSE_SHARE * (now_s - began_s), _FIRST_PAUSE_S)
        time.sleep(min(pause_s, _LONGEST_PAUSE_S))


def reason_for_silence(path: Path, who: str) -> str | None:
    """Return why nothing more will come from the process that `path` describes."""
    try:
        process = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        # Otherwise the other side has not started yet.
        if not path.parent.exists():
            return f"the folder {path.parent} of the link was removed"
        return None
    if process["closed"]:
        return f"{who} (process {process['pid']} on {process['host']}) has closed"
    if process_is_gone(process):
        return f"{who} (process {process['pid']} on {process['host']}) died"
    return None
