"""The deadline of one call, which the watch of a group keeps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray

from rl_distributed.workers.group_watch import GroupWatch
from rl_distributed.workers.open_calls import CallDeadline

__all__ = ["add_call_deadline"]


def add_call_deadline(
    watch: GroupWatch,
    what: str,
    who: Mapping[Any, tuple[int, int]],
    deadline_s: float,
) -> None:
    """Have the watch report the workers that have not finished a call in time.

    Args:
        watch: of the group.
        what: the call, for messages.
        who: (rank, incarnation) of the worker by the reference that ends with its call.
        deadline_s: how long the call may take from now on.
    """
    ends = list(who)
    workers: list[int] = []

    def late() -> tuple[tuple[int, int], ...]:
        # Runs in the watch's thread, which must not block: no timeout,
        # and nothing is fetched.
        _, running = ray.wait(ends, num_returns=len(ends), timeout=0, fetch_local=False)
        # Replaced, not extended: a report of open calls asks as well.
        workers[:] = [who[reference][0] for reference in running]
        return tuple(who[reference] for reference in running)

    def detail() -> str:
        # The watch calls this after `late`, which has filled in `workers`.
        return (
            f"{what} did not end within its call_deadline_s ({deadline_s:g} s) on "
            f"worker(s) {', '.join(map(str, workers))}"
        )

    end = time.monotonic() + deadline_s
    watch.add_deadline(CallDeadline(end, detail, late, what))
