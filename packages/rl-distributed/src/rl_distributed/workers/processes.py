"""Processes of workers: their state in the operating system, and ending them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_distributed.cluster.watch import find_loss
from rl_distributed.process.activity import has_busy_thread

if TYPE_CHECKING:
    from rl_distributed.workers.launch import LaunchedWorker

__all__ = [
    "end_processes",
    "is_at_work",
    "is_stopped",
    "kill_on_node",
    "process_state",
]

logger = logging.getLogger(__name__)

_KILL_GRACE_S = 5.0
# How long the node of a worker may take to end it.
_FAR_KILL_S = 5.0
# Whether a process is at work is sampled this many times, with pauses in between.
_LOOKS = 20
_LOOK_S = 0.05


def end_processes(
    workers: Sequence[LaunchedWorker], timeout_s: float, *, at_once: bool = False
) -> bool:
    """Kill workers and their children; wait until those on this machine are gone.

    Args:
        workers: which.
        timeout_s: how long their end may take.
        at_once: do not let Ray end them first, as a process that is stopped cannot.
    """
    # List children while the parent lives; afterwards they cannot be traced back to it.
    own: list[psutil.Process] = []
    started: list[psutil.Process] = []
    for worker in workers:
        if worker.process is not None and worker.process.is_running():
            own.append(worker.process)
            started += _children(worker.process)
    if ray.is_initialized():
        for worker in workers:
            if worker.actor is not None:
                ray.kill(worker.actor, no_restart=True)
    grace = min(timeout_s, _KILL_GRACE_S)
    # Once Ray's own processes are gone, it no longer ends workers.
    at_once = at_once or find_loss() is not None
    stubborn = own if at_once else _still_there(own, grace)
    for process in stubborn:
        if not at_once:
            logger.warning("worker process %d does not end; killing it", process.pid)
    for process in (*stubborn, *started):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return not _still_there([*stubborn, *started], grace)


def _still_there(
    processes: Sequence[psutil.Process], timeout_s: float
) -> list[psutil.Process]:
    """Wait for processes to end; returns those that did not."""
    end = time.monotonic() + timeout_s
    pause = threading.Event()
    while (alive := [p for p in processes if _is_alive(p)]) and time.monotonic() < end:
        pause.wait(0.01)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    # A zombie has ended; its parent may be slow to notice.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_stopped(worker: LaunchedWorker) -> bool:
    """Whether a worker's process is known to be stopped, as by SIGSTOP."""
    try:
        return (
            worker.process is not None
            and worker.process.status() == psutil.STATUS_STOPPED
        )
    except psutil.Error:
        return False


def is_at_work(worker: LaunchedWorker) -> bool:
    """Whether a worker computes, waits for a turn to, or waits for a disk.

    At most looks one of its threads must do so: Ray's own are awake now and then. One
    whose threads all sleep waits for something. Always False of other machines.
    """
    if worker.process is None:
        return False
    pause = threading.Event()
    found = 0
    for _ in range(_LOOKS):
        found += has_busy_thread(worker.process.pid)
        pause.wait(_LOOK_S)
    return found > _LOOKS / 2


def process_state(worker: LaunchedWorker) -> str:
    """Describe the operating system's view of a process that does not answer."""
    if worker.process is None:
        return ""
    try:
        status = worker.process.status()
    except psutil.Error:
        return "; its process has ended"
    if status == psutil.STATUS_STOPPED:
        return "; its process is stopped (SIGSTOP)"
    return f"; its process is {status}, perhaps with Python's lock held"


def kill_on_node(worker: LaunchedWorker) -> None:
    """Kill a process on another machine that cannot exit by itself, as a stopped one.

    Best effort: its node may be gone too.
    """
    # A process id is only meaningful on its own node.
    node = NodeAffinitySchedulingStrategy(worker.seat.slot.node_id, soft=False)
    # Needs no CPU, because the workers may have claimed all of them.
    kill = ray.remote(num_cpus=0, max_retries=0)(_kill_process)
    reference = kill.options(scheduling_strategy=node).remote(worker.description.pid)
    try:
        ray.get(reference, timeout=_FAR_KILL_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.debug("cannot reach the node of %s: %s", worker.seat, error)


def _kill_process(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        # The number may be another program's by now.
        if process.name().startswith("ray::") or "ray" in " ".join(process.cmdline()):
            process.kill()
    except psutil.Error:
        return
