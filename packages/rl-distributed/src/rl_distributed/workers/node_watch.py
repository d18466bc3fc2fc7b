"""`NodeWatch`: notice quickly that a node of a group is lost.

Ray itself takes half a minute or more to give up a node. This keeps one idle TCP
connection to the Ray process of each node:

```
part            consumes                    produces     is unblocked by
connections     their end, a reset          "broken"     the end of Ray's process
keep-alives     the kernel's probes         "broken"     half of the limit, if no
                                                         packet comes through
new attempts    a refusal, silence          "lost"       three refusals, the limit
```
Losses are reported in the watch's own thread. Shutdown: `close` wakes the thread, which
closes all of these and ends. Nothing runs where all workers are on the driver's node.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import ray

__all__ = ["NodeWatch", "is_reached", "places_of", "reached"]

_CLOSE_S = 5.0
_RECEIVED_BYTES = 65_536
# Only an upper bound, as any event ends the pause.
_LOOK_S = 5.0
# Between two attempts. A process that is gone refuses all of them.
_RETRY_S = 0.3
_REFUSALS = 3
_REACH_S = 1.0
_MOST_AT_ONCE = 64


def places_of(node_ids: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return address and port of the Ray process of those nodes that Ray has up."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] in node_ids
    }


def is_reached(node_id: str) -> bool:
    """Return whether the Ray process of a node takes a connection now."""
    return node_id in reached([node_id])


def reached(node_ids: Collection[str]) -> set[str]:
    """Return those of these nodes whose Ray process takes a connection now."""
    places = places_of(node_ids)
    if not places:
        return set()
    # At once, as each of those that are lost may use up the whole time.
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(places))) as pool:
        answers = pool.map(_takes_connection, places.values())
        return {
            node_id for node_id, is_up in zip(places, answers, strict=True) if is_up
        }


def _takes_connection(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, _REACH_S).close()
    except OSError:
        return False
    return True


@dataclass(slots=True)
class _Node:
    node_id: str
    place: tuple[str, int]
    link: socket.socket | None = None
    is_linked: bool = False
    was_linked: bool = False
    """Whether it was ever reached. One that was not may be behind a firewall."""
    broken_at: float = 0.0
    """`time.monotonic()` of the first sign that it may be lost."""
    next_try: float = 0.0
    refusals: int = 0


class NodeWatch:
    """Watches nodes of a Ray cluster.

    Args:
        name: What the thread is called.
        limit_s: How long a node may be out of reach before it counts as lost.
        on_lost: Called in the watch's thread with the node and why; once for each time
            that it is watched.
    """

    def __init__(
        self, name: str, limit_s: float, on_lost: Callable[[str, str], None]
    ) -> None:
        self._name = name
        self._limit_s = limit_s
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._wanted: dict[str, tuple[str, int]] = {}
        self._nodes: dict[str, _Node] = {}
        self._closing = False
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        # A selector can only be woken by something registered with it.
        self._wake_in, self._wake_out = socket.socketpair()
        # Neither end may block: a full buffer means that the thread is
        # about to wake anyway.
        for link in (self._wake_in, self._wake_out):
            link.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)

    def watch(self, nodes: Mapping[str, tuple[str, int]]) -> None:
        """Watch these nodes from now on, and no others.

        Args:
            nodes: Address and port of the Ray process of each.
        """
        with self._lock:
            self._wanted = dict(nodes)
            if nodes and self._thread is None and not self._closing:
                self._thread = threading.Thread(
                    target=self._run, name=f"nodes-{self._name}", daemon=True
                )
                self._thread.start()
        self._wake()

    def close(self) -> None:
        """End the thread; may be called more than once."""
        with self._lock:
            is_first, self._closing = not self._closing, True
            thread = self._thread
        if thread is None:
            # No thread was ever started, so nothing else closes the sockets.
            if is_first:
                self._close_all()
            return
        self._wake()
        # `on_lost` runs in the thread and may close the watch; a thread
        # cannot join itself.
        if thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_in.send(b".")

    # --- the thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._follow_wishes()
                for key, _ in self._selector.select(self._pause_s()):
                    if isinstance(key.data, _Node):
                        self._handle(key.data)
                    else:
                        self._wake_out.recv(_RECEIVED_BYTES)
                # After the events, because one of them may show that a node is alive.
                for node in list(self._nodes.values()):
                    self._try(node, time.monotonic())
        finally:
            self._close_all()

    def _close_all(self) -> None:
        for node in self._nodes.values():
            self._drop_link(node)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _follow_wishes(self) -> None:
        with self._lock:
            wanted = dict(self._wanted)
        for node in list(self._nodes.values()):
            if wanted.get(node.node_id) != node.place:
                self._drop_link(node)
                del self._nodes[node.node_id]
        for node_id, place in wanted.items():
            if node_id not in self._nodes:
                now = time.monotonic()
                self._nodes[node_id] = _Node(node_id, place, broken_at=now)

    def _pause_s(self) -> float:
        waiting = [node for node in self._nodes.values() if not node.is_linked]
        return _RETRY_S / 2 if waiting else _LOOK_S

    def _handle(self, node: _Node) -> None:
        """Handle an event on the connection to a node."""
        link = node.link
        if link is None:
            return
        if node.is_linked:
            try:
                # Servers of gRPC speak first; what they say does not matter.
                is_open = bool(link.recv(_RECEIVED_BYTES))
            except BlockingIOError:
                return
            except OSError:
                is_open = False
            if not is_open:
                self._drop_link(node)
                # Reconnect at once: a server that closes idle connections is not lost.
                node.broken_at, node.next_try = time.monotonic(), 0.0
            return
        problem = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not problem:
            node.is_linked, node.was_linked, node.refusals = True, True, 0
            self._selector.modify(link, selectors.EVENT_READ, node)
            return
        self._drop_link(node)
        if problem == errno.ECONNREFUSED:
            node.refusals += 1

    def _try(self, node: _Node, now: float) -> None:
        """Go on with the attempts to reach a node, or give it up."""
        if node.is_linked or self._closing:
            return
        host, port = node.place
        if node.refusals >= _REFUSALS:
            self._give_up(node, f"nothing of Ray is left at {host}:{port}")
        # The keep-alives used up the other half of the limit before the link broke.
        elif now - node.broken_at > self._limit_s / 2:
            self._give_up(
                node, f"{host}:{port} has not answered for {self._limit_s:g} s"
            )
        elif node.link is None and now >= node.next_try:
            node.next_try = now + _RETRY_S
            self._connect(node)

    def _connect(self, node: _Node) -> None:
        family = socket.AF_INET6 if ":" in node.place[0] else socket.AF_INET
        link = socket.socket(family, socket.SOCK_STREAM)
        # One thread serves all nodes, so a blocking connect to one would
        # delay the others.
        link.setblocking(False)
        # Idle time plus three probes take half of the limit; reconnecting
        # gets the other half.
        part_s = max(1, round(self._limit_s / 8))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, part_s),
            (socket.TCP_KEEPINTVL, part_s),
            (socket.TCP_KEEPCNT, 3),
        ):
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        problem = link.connect_ex(node.place)
        if problem not in (0, errno.EINPROGRESS):
            link.close()
            node.refusals += problem == errno.ECONNREFUSED
            return
        node.link = link
        self._selector.register(link, selectors.EVENT_WRITE, node)

    def _give_up(self, node: _Node, cause: str) -> None:
        self._drop_link(node)
        del self._nodes[node.node_id]
        with self._lock:
            self._wanted.pop(node.node_id, None)
        if node.was_linked:
            self._on_lost(node.node_id, cause)

    def _drop_link(self, node: _Node) -> None:
        link, node.link, node.is_linked = node.link, None, False
        if link is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(link)
            link.close()
