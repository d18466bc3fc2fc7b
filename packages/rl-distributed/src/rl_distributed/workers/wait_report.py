"""What all workers of this process's groups do, for a report of who waits for whom.

Workers are asked over the connection of their signs of life, which a thread of its own
serves: it answers while a method runs or waits, whatever it waits for. A process that
is stopped, or that holds Python's lock, does not answer; the operating system's view of
it stands in the report instead.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from rl_distributed.failures.worker import WorkerHealth
from rl_distributed.workers.launch import LaunchedWorker
from rl_distributed.workers.processes import process_state
from rl_distributed.workers.supervise import GroupSupervisor, open_supervisors
from rl_distributed.workers.wait import open_waits

__all__ = ["WaitReport", "kill_workers", "report_waits"]

_ASK_S = 5.0


@dataclass(frozen=True)
class WaitReport:
    """State of all workers of the program's groups."""

    workers: list[str]
    """A line for each worker: its process, its call, its last sign of life."""
    calls: list[str]
    """A line for each deadline of a call in flight, or of a wait in this process."""
    stacks: list[str]
    """Stacks of each worker's threads, or why there are none."""


def report_waits(timeout_s: float = _ASK_S) -> WaitReport:
    """Ask all workers what they do.

    Args:
        timeout_s: How long the workers of one group may take to answer.
    """
    waits = open_waits()  # before the workers are asked, which takes time
    report = WaitReport([], [], [])
    for supervisor in open_supervisors():
        _add_group(report, supervisor, timeout_s)
    report.calls.extend(
        f"{what}: whoever waits for it gives up in {left_s:.0f} s"
        for what, left_s in waits
    )
    return report


def _add_group(
    report: WaitReport, supervisor: GroupSupervisor, timeout_s: float
) -> None:
    health = supervisor.health()
    # Those that have no sign of life are asked as well: it may have come back.
    alive = [worker.rank for worker in health if worker.state != "dead"]
    stacks = supervisor.watch.ask_stacks(alive, timeout_s)
    for worker, launched in zip(health, supervisor.workers, strict=False):
        who = f"worker {worker.rank} of group {supervisor.name!r}"
        place = f"node {worker.address}, pid {worker.pid}"
        has_answered = worker.rank in stacks
        report.workers.append(f"{who} ({place}): {_doing(worker)}")
        if has_answered:
            found = stacks[worker.rank]
        elif worker.state == "dead":
            found = "  its process is gone"
        else:
            state = process_state(launched)
            found = f"  it gives no answer{state}"
            report.workers[-1] += state
        report.stacks.append(f"{who} ({place}):\n{found}")
    now = time.monotonic()
    report.calls.extend(
        f"{what}: its deadline is in {end - now:.0f} s"
        for end, what in supervisor.watch.open_deadlines()
    )


def _doing(worker: WorkerHealth) -> str:
    if worker.failure is not None:
        return f"dead: {worker.failure.cause}"
    doing = "waits for a call"
    if worker.method:
        doing = f"in method {worker.method!r} for {worker.method_s:.1f} s"
    if worker.last_seen_s is None:
        return f"{doing}; it is not watched"
    if worker.state == "silent":
        # It may have got the call that it hangs in after its last sign of life.
        was = f"in method {worker.method!r}" if worker.method else "waiting for a call"
        return f"no sign of life for {worker.last_seen_s:.1f} s; then it was {was}"
    return doing


def kill_workers() -> None:
    """Kill all workers on this machine, and their children, without waiting for Ray.

    For a program that is about to leave without closing anything: workers that are
    stopped would outlive it.
    """
    for supervisor in open_supervisors():
        for worker in supervisor.workers:
            _kill_tree(worker)


def _kill_tree(worker: LaunchedWorker) -> None:
    if worker.process is None:
        return
    processes = [worker.process]
    with suppress(psutil.Error):
        processes += worker.process.children(recursive=True)
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
