"""Threads of a group's workers against the cores of their nodes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

__all__ = ["crowding", "usable_cores"]


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    # Not `os.cpu_count`: a container or `taskset` may leave it fewer than there are.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def crowding(
    group: str, places: Iterable[tuple[str, int]], num_threads: int, key: str
) -> str | None:
    """Return a warning about the most crowded node; None if threads have cores.

    Args:
        group: Name of the group of workers.
        places: For each worker its node, and the number of cores that it may use there.
        num_threads: Threads of each worker.
        key: Name of that setting in the user's configuration.
    """
    crowds = [
        (num_workers * num_threads / num_cores, num_workers, num_cores, node)
        for (node, num_cores), num_workers in Counter(places).items()
    ]
    factor, num_workers, num_cores, node = max(crowds, default=(0.0, 0, 1, ""))
    # One worker with many threads is the user's own comparison to make; several of them
    # each spin for cores that the others hold.
    if factor <= 1 or num_workers == 1:
        return None
    most = num_cores // num_workers
    remedy = f"set {key} to {most}" if most else "start fewer workers per node"
    return (
        f"{num_workers} workers of group {group!r} compute with {key}={num_threads} on "
        f"node {node}, which has {num_cores} cores for their "
        f"{num_workers * num_threads} threads: they wait for each other, and take "
        f"several times as long as with a core for each thread; {remedy}"
    )
