"""`ClusterWatch`: notice soon that a Ray process every program needs has ended.

Ray itself lets a program go on for a minute, and then ends it from C++, without a word
and without a chance to keep anything.

```
part                 consumes                        produces      is unblocked by
find_loss            state of two processes          ClusterLoss   nothing: it looks
ClusterWatch thread  find_loss, several times a s    on_lost       close
waits for results    find_loss, once a s             an error      their results
```
A cluster that this process has started is known by its processes. Of one that it has
joined, the raylet is a process of this machine, and the head is asked for a connection.
Shutdown: `close` wakes the thread, which ends. `ray.shutdown` ends the same processes
on purpose; Ray is not initialized any more by then, and nothing is lost.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker

from rl_distributed.errors import ClusterLostError
from rl_distributed.failures.cluster_loss import (
    RECONNECT_S,
    ClusterLoss,
    RayProcess,
    reconnect_s,
)

__all__ = ["ClusterWatch", "find_loss", "raise_if_lost"]

_LOOK_S = 0.25
_CLOSE_S = 5.0
_CONNECT_S = 1.0
# Between two attempts to reach the head, and how many in a row may fail.
_PROBE_S = 1.0
_FAILURES = 3


class ClusterWatch:
    """Watches the Ray cluster of this process in a thread.

    It may begin before Ray is up, and goes on when Ray is started again.

    Args:
        on_lost: Called in the thread with what was lost, once for each cluster.
    """

    def __init__(self, on_lost: Callable[[ClusterLoss], None]) -> None:
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="cluster-watch", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        told: ClusterLoss | None = None
        while not self._stop.wait(_LOOK_S):
            loss = find_loss()
            # A session keeps its loss object, so the same object means no news.
            if loss is not None and loss is not told and not self._stop.is_set():
                told = loss
                self._on_lost(loss)

    def close(self) -> None:
        """End the thread; may be called more than once."""
        self._stop.set()
        # `on_lost` runs in the thread and may close it; a thread cannot join itself.
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def __enter__(self) -> ClusterWatch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def find_loss() -> ClusterLoss | None:
    """Return which process of Ray has ended, if this process's cluster is lost by that.

    It looks at processes and does not ask Ray, so it answers at once; a head on another
    machine is asked for a connection, once a second at most.
    """
    global _session
    node: Any = ray_worker._global_node
    if node is None or not ray.is_initialized():
        return None
    with _lock:
        # A different node object means that Ray was restarted.
        if _session is None or _session.node is not node:
            _session = _Session(node)
        loss = _session.look()
    # `ray.shutdown` may have begun since.
    return loss if ray.is_initialized() else None


def raise_if_lost(*, at_once: bool = False) -> None:
    """End a wait that cannot succeed any more.

    Args:
        at_once: Raise even while workers that are up still answer, because more than
            their answers is needed.

    Raises:
        ClusterLostError: The workers cannot be reached any more, or not for long.
    """
    loss = find_loss()
    if loss is not None and (at_once or time.monotonic() >= loss.waits_give_up_at):
        error = ClusterLostError(str(loss))
        error.loss = loss
        raise error


def _let_errors_be_shown() -> None:
    """Let Python report an uncaught exception: Ray would first ask its head."""
    if sys.excepthook is getattr(ray_worker, "custom_excepthook", None):
        sys.excepthook = getattr(ray_worker, "normal_excepthook", sys.__excepthook__)


class _Session:
    """The watched processes of one cluster."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.address = str(node.gcs_address)
        self.loss: ClusterLoss | None = None
        # Private to Ray; without it, the processes are found as in a
        # cluster that was joined.
        started = getattr(node, "all_processes", {})
        self._parts: dict[RayProcess, _Child | _Neighbour | _Head] = {}
        names: tuple[RayProcess, ...] = ("raylet", "gcs_server")
        for name in names:
            for info in started.get(name, ()):
                self._parts[name] = _Child(info.process)
        if "gcs_server" not in self._parts:
            self._parts["gcs_server"] = _Head(self.address)
        if "raylet" not in self._parts:
            raylet = _find_raylet(str(node.raylet_socket_name))
            if raylet is not None:
                self._parts["raylet"] = _Neighbour(raylet)

    def look(self) -> ClusterLoss | None:
        """Look at everything once; a loss stays."""
        if self.loss is None:
            for name, part in self._parts.items():
                how = part.end()
                if how:
                    now = time.monotonic()
                    self.loss = ClusterLoss(name, part.pid, self.address, how, now)
                    _let_errors_be_shown()
                    break
        return self.loss


class _Child:
    """A process that this one has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid: int | None = process.pid

    def end(self) -> str:
        """How it ended; empty: it runs."""
        # The system keeps the exit code of a child, so the signal can be named.
        code = self._process.poll()
        if code is None:
            return ""
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"has ended with exit code {code}"


class _Neighbour:
    """A process of this machine."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.pid: int | None = process.pid

    def end(self) -> str:
        """How it ended; empty: it runs."""
        # A zombie has ended too; its parent may be slow to collect it.
        with suppress(psutil.NoSuchProcess):
            if (
                self._process.is_running()
                and self._process.status() != psutil.STATUS_ZOMBIE
            ):
                return ""
        return "has ended"


class _Head:
    """The head of a cluster, which may be on another machine."""

    pid: int | None = None

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._next = 0.0
        self._failures = 0
        self._failing_since = 0.0

    def end(self) -> str:
        """Why it counts as lost; empty: it answers, or has not failed often enough."""
        now = time.monotonic()
        if now < self._next:
            return ""
        try:
            socket.create_connection(self._place, _CONNECT_S).close()
        except OSError as error:
            if not self._failures:
                self._failing_since = now
            self._failures += 1
            # Where it is known to come back, as in Kubernetes, it is given the time.
            patience_s = max(0.0, reconnect_s() - RECONNECT_S)
            if (
                self._failures >= _FAILURES
                and time.monotonic() - self._failing_since >= patience_s
            ):
                return f"takes no connection any more ({error})"
            self._next = time.monotonic() + _PROBE_S / 2
        else:
            self._failures = 0
            self._next = time.monotonic() + _PROBE_S
        return ""


def _find_raylet(socket_name: str) -> psutil.Process | None:
    """Find the Ray process of this machine that a program has joined."""
    wanted = f"--raylet_socket_name={socket_name}"
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == "raylet" and wanted in process.cmdline():
                return process
    return None


# One look at a time; the session is that of the cluster that Ray is in.
_lock = threading.Lock()
_session: _Session | None = None
