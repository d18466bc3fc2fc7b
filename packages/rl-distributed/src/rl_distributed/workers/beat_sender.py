"""The sign of life that a worker's process sends to its driver.

```
worker: thread of BeatSender --- TCP, a line a second ---> driver: GroupWatch
```
The connection says two things without anybody asking: the system closes it when the
process ends, and no line comes when the process is stopped or holds Python's lock. A
worker shows that it is one by answering a random challenge with the group's key, which
itself never crosses the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rl_distributed.process.stacks import thread_stacks
from rl_distributed.workers.cancellation import note_cancelled

__all__ = [
    "END_LINE",
    "STACKS_LINE",
    "Beat",
    "BeatSender",
    "WatchTarget",
    "in_process_group",
    "proof",
]

END_LINE = b"!"
"""Sent to a worker that has been given up and replaced: it must exit at once."""
STACKS_LINE = b"#"
"""Sent to a worker to ask what its threads do; it answers with an object."""

# On a busy machine the driver may take seconds to accept.
_CONNECT_S = 5.0
# A driver that has moved on accepts no more; one whose network was away for some beats
# does.
_ATTEMPTS = 5
# A connection that lasts this long was to the driver, and not to whoever has got its
# port since.
_STEADY_S = 10.0
_RECEIVED_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class WatchTarget:
    """Address, identity and key with which a worker reports to its driver."""

    address: str
    port: int
    rank: int
    incarnation: int
    """Number of processes that this rank has had before."""
    interval_s: float
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Beat:
    """One sign of life."""

    method: str = ""
    """The method that runs; empty: none."""
    method_s: float = 0.0
    """For how long it has been running."""
    in_process_group: bool = False
    """Whether the process has a process group of torch with others in it."""
    calls: tuple[str, ...] = ()
    """Ray's ids of the calls that run."""

    def line(self) -> bytes:
        """Encode the beat as one line of the connection, without its newline."""
        fields = [self.method, self.method_s, self.in_process_group, self.calls]
        return json.dumps(fields).encode()

    @classmethod
    def of_line(cls, line: bytes) -> Beat:
        """Decode a line that `line` has made."""
        method, method_s, in_group, calls = json.loads(line)
        return cls(str(method), float(method_s), bool(in_group), tuple(calls))


def proof(key: bytes, challenge: str, rank: int, incarnation: int) -> str:
    """Return what a worker answers to a challenge."""
    text = f"{challenge}:{rank}:{incarnation}".encode()
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def in_process_group() -> bool:
    """Whether this process shares a process group of torch with others."""
    # Asked for and not imported: that would cost a second, and a worker without torch
    # has no process group.
    dist: Any = sys.modules.get("torch.distributed")
    try:
        return bool(
            dist is not None
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size() > 1
        )
    except (AttributeError, RuntimeError, ValueError):
        # The module is half imported, or the group is being made or taken apart.
        return False


class BeatSender:
    """Sends beats from a thread until the process ends.

    Args:
        target: where to.
        running: the calls that run now: their methods, when they began
            (`time.monotonic`) and Ray's ids of them.
        report: a line to send before the next beat; None: there is nothing to say.
    """

    def __init__(
        self,
        target: WatchTarget,
        running: Callable[[], Sequence[tuple[str, float, str]]],
        report: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        self._target = target
        self._running = running
        self._report = report

    def start(self) -> bool:
        """Connect and begin; False where the driver cannot be reached."""
        try:
            connection = self._connect()
        except OSError:
            return False
        # Daemon: the thread sends for as long as the process lives and
        # must not keep it alive.
        thread = threading.Thread(
            target=self._run, args=(connection,), name="worker-beats", daemon=True
        )
        thread.start()
        return True

    def _connect(self) -> socket.socket:
        target = self._target
        connection = socket.create_connection(
            (target.address, target.port), timeout=_CONNECT_S
        )
        try:
            # The key itself never travels.
            challenge = connection.makefile("r").readline().strip()
            answer = proof(target.key, challenge, target.rank, target.incarnation)
            hello = [target.rank, target.incarnation, answer]
            connection.sendall(json.dumps(hello).encode() + b"\n")
            # Send a beat at once: the watch counts a worker as connected
            # from its first beat.
            connection.sendall(self._beat().line() + b"\n")
        except OSError:
            connection.close()
            raise
        return connection

    def _beat(self) -> Beat:
        running = self._running()
        if not running:
            return Beat(in_process_group=in_process_group())
        # The oldest call is the one that may hang.
        method, began, _ = min(running, key=lambda call: call[1])
        calls = tuple(call for _, _, call in running)
        return Beat(method, time.monotonic() - began, in_process_group(), calls)

    def _run(self, connection: socket.socket | None) -> None:
        pause = threading.Event()
        left = _ATTEMPTS
        while left > 0:
            left -= 1
            if connection is not None:
                began_s = time.monotonic()
                with suppress(OSError):
                    self._send_until_closed(connection)
                connection.close()
                connection = None
                # A process may live for weeks, and lose its connection now and then.
                if time.monotonic() - began_s >= _STEADY_S:
                    left = _ATTEMPTS
            pause.wait(self._target.interval_s)
            with suppress(OSError):
                connection = self._connect()
        if connection is not None:
            connection.close()

    def _send_until_closed(self, connection: socket.socket) -> None:
        rest = b""
        while True:
            # A wait and not a sleep: the driver may ask in between.
            asked, _, _ = select.select([connection], [], [], self._target.interval_s)
            if asked:
                said = connection.recv(_RECEIVED_BYTES)
                if not said:
                    raise ConnectionError("the driver has closed the connection")
                # An empty line asks for a beat at once, others name cancelled calls.
                *lines, rest = (rest + said).split(b"\n")
                if END_LINE in lines:
                    # It stood still or was out of reach when it was given up: nothing
                    # that it would still do may happen.
                    os.kill(os.getpid(), signal.SIGKILL)
                for line in filter(None, lines):
                    if line == STACKS_LINE:
                        connection.sendall(_stacks_line())
                    else:
                        note_cancelled(line.decode())
            # Before the beat: whoever has asked for one then has the report as well.
            if report := self._report():
                connection.sendall(report + b"\n")
            connection.sendall(self._beat().line() + b"\n")


def _stacks_line() -> bytes:
    # Without the thread that asks: it is the same in every report.
    stacks = thread_stacks(leave_out=[threading.get_ident()])
    return json.dumps({"stacks": stacks}).encode() + b"\n"
