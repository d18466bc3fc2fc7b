"""`GroupWatch`: know at any time which workers of a group are alive.

One thread for each group, which costs nothing while nothing happens:

```
part              consumes                     produces            is unblocked by
listener socket   connections of workers       challenge           a worker that starts
connections       one beat a second            last sign of life   beats, or their end
                  calls that were executed     CallReport
process handles   -                            "died"              the process ends
call deadlines    calls with a deadline        "late"              time
```
Events reach the supervisor in the watch's own thread. Shutdown: `close` wakes the
thread, which closes all of these and ends.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any, Literal

from rl_distributed.workers.beat_sender import (
    END_LINE,
    STACKS_LINE,
    Beat,
    WatchTarget,
    proof,
)
from rl_distributed.workers.call_collector import add_source, deliver
from rl_distributed.workers.call_recorder import CallReport
from rl_distributed.workers.open_calls import CallDeadline, OpenCalls

__all__ = ["GroupWatch", "Seen", "WatchEvent"]

# The thread ends within one pass; `close` must not hang even if it does not.
_CLOSE_S = 5.0
# A connection that sends more than this before it has proved itself is no worker.
_HELLO_BYTES = 1_024
_RECEIVED_BYTES = 65_536
# Four beats at the usual interval, as single ones may be late on a busy machine.
_QUIET_S = 4.0
EventKind = Literal["died", "hung", "late", "lost", "quiet"]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One observation of the watch."""

    kind: EventKind
    """died: the process is gone; lost: its connection is; quiet: no sign of life for
    some seconds; hung: none for too long; late: a call's deadline has passed."""
    who: tuple[tuple[int, int], ...]
    """(rank, incarnation) of each worker that it is about."""
    detail: str = ""


@dataclass(slots=True)
class Seen:
    """The last sign of life of one worker."""

    incarnation: int
    at: float
    """`time.monotonic()` of it."""
    beat: Beat = field(default_factory=Beat)
    is_connected: bool = False
    is_quiet: bool = False
    """Whether its silence has been reported, as happens after some seconds."""


@dataclass(slots=True)
class _Connection:
    """One accepted connection; `rank` is -1 until it has proved to be a worker."""

    link: socket.socket
    challenge: str
    rank: int = -1
    incarnation: int = -1
    received: bytes = b""


class GroupWatch:
    """Watches the processes of one group.

    Args:
        name: the group's, by which the thread is called and its calls are reported.
        address: the address to listen on, which the workers can reach.
        limit_s: how long a worker may give no sign of life; None: for ever.
        on_event: called in the watch's thread with whatever it notices.
    """

    def __init__(
        self,
        name: str,
        address: str,
        limit_s: float | None,
        on_event: Callable[[WatchEvent], None],
    ) -> None:
        self._name, self._limit_s = name, limit_s
        # Four beats within the limit, so that a lost packet or a busy moment is no
        # hang.
        self.interval_s = 1.0 if limit_s is None else min(1.0, limit_s / 4)
        self._on_event = on_event
        # Anybody on the network may connect; only workers of this group know the key.
        self._key = secrets.token_bytes(32)
        self._changed = threading.Condition()
        self._seen: dict[int, Seen] = {}
        self._silent: set[int] = set()
        self._handles: dict[int, int] = {}
        self._calls = OpenCalls(self.interval_s)
        self._closing = False
        self._asked = 0
        self._asked_before_pass = 0
        self._stacks: dict[int, str] = {}
        self._selector = selectors.DefaultSelector()
        # All workers of a group start, and therefore connect, at about the same time.
        self._listener = socket.create_server((address, 0), backlog=1_024)
        self._address, self._port = self._listener.getsockname()[:2]
        # A selector can only be woken by something that it selects.
        self._wake_in, self._wake_out = socket.socketpair()
        # A full buffer means that the thread is to be woken anyway.
        self._wake_in.setblocking(False)
        for link in (self._listener, self._wake_out):
            link.setblocking(False)
            self._selector.register(link, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run, name=f"watch-{name}", daemon=True
        )
        self._thread.start()
        add_source(self)

    # --- called from other threads ------------------------------------------------

    def target(self, rank: int, incarnation: int) -> WatchTarget:
        """Return the target that the worker of this rank reports to."""
        return WatchTarget(
            self._address, self._port, rank, incarnation, self.interval_s, self._key
        )

    def expect(self, rank: int, incarnation: int, pid: int | None) -> None:
        """Watch a worker from now on; `pid` where its process is on this machine."""
        with self._changed:
            if self._closing:
                return
            known = self._seen.get(rank)
            if known is None or known.incarnation != incarnation:
                self._seen[rank] = Seen(incarnation, time.monotonic())
            self._silent.discard(rank)
            self._drop_handle(rank)
            if pid is not None:
                # It may have ended by now; the calls that wait for it notice.
                with suppress(OSError):
                    # Ready when the process ends, also by SIGKILL, and never means
                    # another process of the same number.
                    handle = os.pidfd_open(pid)
                    self._handles[rank] = handle
                    self._selector.register(
                        handle, selectors.EVENT_READ, (rank, incarnation)
                    )
        self._wake()

    def forget(self, rank: int) -> None:
        """Watch the worker of this rank no longer."""
        with self._changed:
            self._seen.pop(rank, None)
            self._silent.discard(rank)
            self._drop_handle(rank)

    def add_deadline(self, deadline: CallDeadline) -> None:
        """Report the workers that are late with a call when its deadline passes."""
        self._calls.add(deadline)
        self._wake()

    def seen(self) -> dict[int, Seen]:
        """Return the last sign of life of each worker."""
        with self._changed:
            return dict(self._seen)

    def ask(self, ranks: Collection[int], timeout_s: float) -> dict[int, Beat]:
        """Return new beats of these workers, those that arrive in time."""
        began = time.monotonic()
        with self._changed:
            self._asked += 1
            number = self._asked
        self._wake(b"?")

        def answered() -> bool:
            # A worker that counts as not connected may have said hello, unread so far.
            return self._closing or (
                self._asked_before_pass >= number
                and all(
                    not (seen := self._seen.get(rank))
                    or not seen.is_connected
                    or seen.at > began
                    for rank in ranks
                )
            )

        with self._changed:
            self._changed.wait_for(answered, timeout_s)
            return {
                rank: seen.beat
                for rank in ranks
                if (seen := self._seen.get(rank)) and seen.at > began
            }

    def ask_all(self, timeout_s: float) -> None:
        """Have all workers report their calls now; wait for those that do in time."""
        self.ask(list(self.seen()), timeout_s)

    def ask_stacks(self, ranks: Collection[int], timeout_s: float) -> dict[int, str]:
        """Return the stacks of these workers' threads, those that arrive in time."""
        with self._changed:
            for rank in ranks:
                self._stacks.pop(rank, None)
        for rank in ranks:
            self._say(rank, STACKS_LINE)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or all(rank in self._stacks for rank in ranks),
                timeout_s,
            )
            return {r: self._stacks[r] for r in ranks if r in self._stacks}

    def open_deadlines(self) -> list[tuple[float, str]]:
        """Return the deadlines of calls: when (`time.monotonic`), and of what."""
        return self._calls.running()

    def cancel(self, rank: int, task_id: str) -> None:
        """Tell a worker that a call was cancelled, whether or not it has begun."""
        self._say(rank, task_id.encode())

    def end(self, rank: int) -> None:
        """Tell the worker of this rank to end, should it still hear."""
        self._say(rank, END_LINE)

    def _say(self, rank: int, line: bytes) -> None:
        with self._changed:
            known = {} if self._closing else self._selector.get_map()
            for key in list(known.values()):
                if isinstance(key.data, _Connection) and key.data.rank == rank:
                    with suppress(OSError):
                        key.data.link.send(line + b"\n")

    def close(self) -> None:
        """End the thread; may be called more than once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _wake(self, message: bytes = b".") -> None:
        with suppress(OSError):
            self._wake_in.send(message)

    def _drop_handle(self, rank: int) -> None:
        handle = self._handles.pop(rank, None)
        if handle is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(handle)
            os.close(handle)

    # --- the thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                events: list[WatchEvent] = []
                asked = self._asked
                pause_s = self._pause_s() if asked == self._asked_before_pass else 0.0
                for key, _ in self._selector.select(pause_s):
                    self._handle(key.fileobj, key.data, events)
                if asked != self._asked_before_pass:
                    # All that had arrived when these asked is read.
                    with self._changed:
                        self._asked_before_pass = asked
                        self._changed.notify_all()
                # Only after all that has arrived is read: this process may have been
                # the one that stood still.
                events += self._overdue(time.monotonic())
                self._calls.drop_ended(time.monotonic())
                for event in events:
                    if not self._closing:
                        self._on_event(event)
        finally:
            self._close_all()

    def _pause_s(self) -> float:
        left = self._calls.next_end - time.monotonic()
        return min(self.interval_s, max(0.0, left))

    def _handle(self, what: Any, data: Any, events: list[WatchEvent]) -> None:
        if what is self._listener:
            self._accept()
        elif what is self._wake_out:
            if b"?" in self._wake_out.recv(_RECEIVED_BYTES):
                self._ask_all()
        elif isinstance(data, _Connection):
            self._read(data, events)
        else:
            rank, incarnation = data
            with self._changed:
                self._drop_handle(rank)
            events.append(WatchEvent("died", ((rank, incarnation),)))

    def _accept(self) -> None:
        with suppress(OSError):
            link, _ = self._listener.accept()
            link.setblocking(False)
            connection = _Connection(link, secrets.token_hex(16))
            link.send(connection.challenge.encode() + b"\n")
            with self._changed:
                self._selector.register(link, selectors.EVENT_READ, connection)

    def _ask_all(self) -> None:
        with self._changed:
            keys = list(self._selector.get_map().values())
        for key in keys:
            if isinstance(key.data, _Connection) and key.data.rank >= 0:
                with suppress(OSError):
                    key.data.link.send(b"\n")

    def _read(self, connection: _Connection, events: list[WatchEvent]) -> None:
        try:
            received = connection.link.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._disconnect(connection, events)
            return
        connection.received += received
        *lines, connection.received = connection.received.split(b"\n")
        try:
            for line in lines:
                if connection.rank < 0 and len(line) > _HELLO_BYTES:
                    raise ValueError("no worker says so much before it is known")
                self._understand(connection, line)
            if connection.rank < 0 and len(connection.received) > _HELLO_BYTES:
                raise ValueError("no worker says so much before it is known")
        # RecursionError: JSON that nests too deep.
        except (ValueError, TypeError, RecursionError):
            # Not one of our workers; strangers are not told why they are refused.
            self._disconnect(connection, events)

    def _understand(self, connection: _Connection, line: bytes) -> None:
        if connection.rank < 0:
            rank, incarnation, answer = json.loads(line)
            right = proof(self._key, connection.challenge, rank, incarnation)
            if not compare_digest(str(answer), right):
                raise ValueError("wrong proof")
            connection.rank, connection.incarnation = rank, incarnation
            return
        if line.startswith(b"{"):
            found = json.loads(line)
            if "calls" in found:
                report = CallReport.of_fields(found["calls"])
                deliver(self._name, connection.rank, report)
                return
            stacks = str(found.get("stacks", ""))
            with self._changed:
                self._stacks[connection.rank] = stacks
                self._changed.notify_all()
            return
        with self._changed:
            seen = self._seen.get(connection.rank)
            if seen is None:
                # It connects before it is expected.
                seen = Seen(connection.incarnation, 0.0)
                self._seen[connection.rank] = seen
            if seen.incarnation > connection.incarnation:
                return
            seen.incarnation = connection.incarnation
            seen.at = time.monotonic()
            seen.beat = Beat.of_line(line)
            seen.is_connected, seen.is_quiet = True, False
            self._silent.discard(connection.rank)
            self._changed.notify_all()

    def _disconnect(self, connection: _Connection, events: list[WatchEvent]) -> None:
        with self._changed:
            self._selector.unregister(connection.link)
            connection.link.close()
            if connection.rank < 0:
                return
            seen = self._seen.get(connection.rank)
            if seen is None or seen.incarnation != connection.incarnation:
                return
            self._changed.notify_all()
            if connection.rank in self._handles:
                # The handle of the process says surely whether it has ended.
                return
        who = (connection.rank, connection.incarnation)
        events.append(WatchEvent("lost", (who,)))

    def _overdue(self, now: float) -> list[WatchEvent]:
        events: list[WatchEvent] = []
        with self._changed:
            for rank, seen in self._seen.items():
                silent_s = now - seen.at
                who = (rank, seen.incarnation)
                if seen.is_connected and silent_s > _QUIET_S and not seen.is_quiet:
                    seen.is_quiet = True
                    detail = f"no sign of life for {silent_s:.1f} s"
                    events.append(WatchEvent("quiet", (who,), detail))
                if (
                    self._limit_s is not None
                    and seen.is_connected
                    and silent_s > self._limit_s
                    and rank not in self._silent
                ):
                    self._silent.add(rank)
                    detail = (
                        f"no sign of life for {silent_s:.1f} s (the limit is "
                        f"{self._limit_s:g} s)"
                    )
                    events.append(WatchEvent("hung", (who,), detail))
        # Outside the lock, because `late` asks Ray.
        for call in self._calls.take_passed(now):
            # Ray may have been shut down by now. Nobody is late then, and this thread
            # must go on for whoever asks it.
            with suppress(Exception):
                if late := call.late():
                    events.append(WatchEvent("late", late, call.detail()))
        return events

    def _close_all(self) -> None:
        with self._changed:
            for rank in list(self._handles):
                self._drop_handle(rank)
            for key in list(self._selector.get_map().values()):
                if isinstance(key.data, _Connection):
                    key.data.link.close()
            self._selector.close()
            for link in (self._listener, self._wake_in, self._wake_out):
                link.close()
