"""Where the ranks of a replica meet: rank 0 lets in who knows the secret.

```
connection --accept--> door thread --> a greeter thread each --> met --> meet
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| door | connections | greeters | a connection | the shutdown of the socket |
| greeter | a handshake | a rank, or why not | the peer | its limit, the end of `meet` |
| `meet` | ranks | links | the last rank | its deadline |

Anything on the network may connect: a scanner, a health check, a rank of another run.
It costs a line in the log and never the replica: handshakes go on beside each other,
each has a limit, and whatever goes wrong in one is the fault of that peer.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, TypeAlias

from rl_distributed.logs.logging import get_logger

__all__ = ["greet_leader", "link_of", "meet", "shut"]

_logger = get_logger(__name__)

_HANDSHAKE_S = 30.0
_MOST_LINES = 20
_MOST_AT_ONCE = 256

Link: TypeAlias = "Connection[Any, Any]"


def meet(
    server: socket.socket,
    secret: bytes,
    num_ranks: int,
    *,
    deadline_s: float,
    handshake_s: float = _HANDSHAKE_S,
) -> dict[int, Link]:
    """Return the links to the ranks from 1 to `num_ranks`, once all have connected.

    Args:
        server: A socket that listens; it is closed.
        secret: What both sides prove that they know.
        num_ranks: Number of the ranks.
        deadline_s: Limit for all of them together.
        handshake_s: Limit for one connection.

    Raises:
        TimeoutError: Some did not connect in time; it says what else did.
    """
    host, port = server.getsockname()[:2]
    meeting = _Meeting(server, secret, handshake_s)
    try:
        return meeting.wait(num_ranks, time.monotonic() + deadline_s)
    except queue.Empty:
        missing = ", ".join(str(rank) for rank in meeting.missing(num_ranks))
        raise TimeoutError(
            f"rank {missing} of the replica did not connect to {host}:{port} within "
            f"{deadline_s:g} s; {meeting.refusals()}. See whether their processes run "
            "and reach that address"
        ) from None
    finally:
        meeting.close()


class _Meeting:
    def __init__(
        self, server: socket.socket, secret: bytes, handshake_s: float
    ) -> None:
        self._server, self._secret = server, secret
        self._handshake_s = handshake_s
        self._found: dict[int, Link] = {}
        self._met: queue.Queue[tuple[Any, Link, str]] = queue.Queue()
        self._refused: Counter[str] = Counter()
        # Guards what follows: greeters come and go in threads.
        self._lock = threading.Lock()
        self._greeted: set[Link] = set()
        self._is_over = False
        self._door = threading.Thread(target=self._open, name="rank-door", daemon=True)
        self._door.start()

    def wait(self, num_ranks: int, end_s: float) -> dict[int, Link]:
        """Return the links once all ranks are there; raise `queue.Empty` if not."""
        while len(self._found) < num_ranks:
            rank, link, sender = self._met.get(
                timeout=max(0.0, end_s - time.monotonic())
            )
            if rank not in self.missing(num_ranks):
                self._refuse(sender, f"sent the rank {rank!r}, which is not awaited")
                link.close()
                continue
            self._found[rank] = link
        return self._found

    def missing(self, num_ranks: int) -> list[int]:
        """Return the ranks that are not there."""
        return [rank for rank in range(1, num_ranks + 1) if rank not in self._found]

    def refusals(self) -> str:
        """Return what other connections there were, as a part of a sentence."""
        with self._lock:
            found = dict(self._refused)
            if self._greeted:
                found["was silent so far"] = len(self._greeted)
        if not found:
            return "no connection was refused"
        why = "; ".join(f"{number} {reason}" for reason, number in found.items())
        return f"{sum(found.values())} other connections were refused ({why})"

    def close(self) -> None:
        """Take no more connections, and end those that are still being greeted."""
        with self._lock:
            self._is_over = True
            greeted = list(self._greeted)
        for link in greeted:
            shut(link)
        # Only this ends an `accept` that waits; a close would not.
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._door.join()
        self._server.close()

    def _open(self) -> None:
        with suppress(OSError):  # the end of the meeting
            while True:
                end, (address, *_) = self._server.accept()
                link = link_of(end)
                with self._lock:
                    is_over = self._is_over
                    is_full = len(self._greeted) >= _MOST_AT_ONCE
                    if not is_over and not is_full:
                        self._greeted.add(link)
                if is_over or is_full:
                    link.close()
                    continue
                threading.Thread(
                    target=self._greet,
                    args=(link, address),
                    name="rank-greeter",
                    daemon=True,
                ).start()

    def _greet(self, link: Link, sender: str) -> None:
        try:
            with _time_limit(link, self._handshake_s):
                # Both sides prove that they know the secret, before anything is
                # unpickled.
                deliver_challenge(link, self._secret)
                answer_challenge(link, self._secret)
                rank = link.recv()
        except Exception as error:
            # Of any type: a peer can send whatever it likes.
            self._leave(link)
            link.close()
            self._refuse(sender, _reason(error, self._handshake_s))
        else:
            self._leave(link)
            self._met.put((rank, link, sender))

    def _leave(self, link: Link) -> None:
        with self._lock:
            self._greeted.discard(link)

    def _refuse(self, sender: str, reason: str) -> None:
        with self._lock:
            if self._is_over:
                return
            self._refused[reason] += 1
            number = sum(self._refused.values())
        if number <= _MOST_LINES:
            _logger.warning(
                "a connection from %s to rank 0 of the replica was refused: it %s%s",
                *(sender, reason),
                "; further ones are only counted" if number == _MOST_LINES else "",
            )


def _reason(error: Exception, handshake_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"did not prove within {handshake_s:g} s that it knows the secret"
    if isinstance(error, AuthenticationError):
        return "does not know the secret"
    if isinstance(error, EOFError | ConnectionError):
        return "closed before it had proved that it knows the secret"
    return "sent something else than the handshake of a rank"


def greet_leader(link: Link, secret: bytes, rank: int, limit_s: float) -> None:
    """Introduce a rank to rank 0.

    Args:
        link: The connection to rank 0.
        secret: What both sides prove that they know.
        rank: The rank.
        limit_s: Limit for the handshake.

    Raises:
        AuthenticationError: Another secret is known there.
        TimeoutError: Rank 0 did not answer in time.
        OSError, EOFError: It has ended the connection.
    """
    with _time_limit(link, limit_s):
        answer_challenge(link, secret)
        deliver_challenge(link, secret)
        link.send(rank)


def link_of(end: socket.socket) -> Link:
    """Return a connection for messages; it owns the socket."""
    # A limit was one for connecting: calls may be hours apart.
    end.settimeout(None)
    # Otherwise the kernel may hold a small message back until the one before it is
    # acknowledged.
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(end.detach())


def shut(link: Link) -> None:
    """Shut a connection down; a close would not end the wait of a reader."""
    kind = (socket.AF_INET, socket.SOCK_STREAM)
    with suppress(OSError), socket.fromfd(link.fileno(), *kind) as end:
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def _time_limit(link: Link, limit_s: float) -> Iterator[None]:
    """Shut a connection down if the block has not ended in time.

    A limit for each read would not do: a peer may send one byte after the other.

    Raises:
        TimeoutError: It had not.
    """
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        shut(link)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, EOFError):
        if not is_late.is_set():
            raise
    finally:
        timer.cancel()
        # So that it never shuts down a link that was handed on, or its successor.
        timer.join()
    if is_late.is_set():
        raise TimeoutError(f"the handshake did not end within {limit_s:g} s")
