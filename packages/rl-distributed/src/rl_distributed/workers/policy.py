"""Failure policies: how a group reacts when one of its workers fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rl_distributed.errors import ConfigError

__all__ = [
    "FailFast",
    "FailurePolicy",
    "OnNodeLost",
    "Restart",
    "RestartGroup",
    "RestartWorker",
    "doubled",
]

OnNodeLost = Literal["wait", "shrink", "fail"]
"""What to do about a worker that no node has room for."""

# Any stands for `RayWorkerGroup`, which is built on policies: naming it here would
# close a circle of imports.
RestoreState = Callable[[Any, Sequence[int]], None]


def doubled(pause_s: float, times: int) -> float:
    """Return a pause that has been doubled so often, however often that is."""
    # Beyond this, the power is more than a float holds, and raises.
    return pause_s * 2.0 ** min(times, 1_000)


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """Base of all policies; use one of the subclasses.

    A worker *fails* when its process or its node is gone, when it gives no sign of life
    for `heartbeat_limit_s`, or when a call exceeds its own `call_deadline_s`; the rest
    of its process is then terminated. Workers that share a torch process group with it
    could only wait for it, so they are terminated as well.

    A method that raises ends the call and not the worker. Only workers of the same call
    that are in a process group, and still in the call after `release_after_s`, are
    terminated, because they wait for the one that raised.
    """

    heartbeat_limit_s: float | None = 120.0
    """How long a worker may give no sign of life, as when its process is stopped; None:
    no limit. Native code that holds the GIL, for instance while it reads a large file,
    gives none either; a process on this machine that is visibly at work gets another
    minute."""
    node_limit_s: float = 10.0
    """How long a node may be out of reach before its workers count as dead. One whose
    Ray process has ended is lost at once."""
    on_node_lost: OnNodeLost = "wait"
    """What a restart does if no node has room for the worker, as after the loss of one:

    - `wait` for a node up to `resources_deadline_s`;
    - `shrink`: go on without the worker while at least `min_workers` are up, and start
      it as soon as a node has room; with fewer, like `wait`. For workers that do not
      need each other. Such a group also starts without the workers whose node is still
      to come (`RayVirtualCluster.place(min_nodes=...)`);
    - `fail`: raise the failure at once."""
    min_workers: int = 1
    """Smallest number of workers that a group with `shrink` goes on with."""
    resources_deadline_s: float = 300.0
    """How long a restart may wait for a node with room after one was lost: for its
    return or for another. Calls and `recover` wait; a wait for results whose call is
    not retried raises the failure at once instead. Waiting does not count as a restart;
    if it fails, the next call tries again."""
    release_after_s: float = 1.0
    """How long workers of a process group may take to end a call by themselves once
    one of them has failed."""
    release: Literal["group", "tied"] = "group"
    """Which workers share a process group: all of the worker group, or only those that
    are tied (`bundle_indices_list`)."""

    def __post_init__(self) -> None:
        limit = self.heartbeat_limit_s
        if limit is not None and limit <= 0:
            raise ConfigError(
                f"heartbeat_limit_s must be positive, or None for no limit: got {limit}"
            )
        for name in ("node_limit_s", "resources_deadline_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} must be positive: got {value}")
        if self.on_node_lost not in get_args(OnNodeLost):
            raise ConfigError(
                "on_node_lost must be 'wait', 'shrink' or 'fail': got "
                f"{self.on_node_lost!r}"
            )
        if isinstance(self.min_workers, bool) or self.min_workers < 1:
            raise ConfigError(
                f"min_workers must be at least 1: got {self.min_workers!r}"
            )
        if self.release_after_s < 0:
            raise ConfigError(
                f"release_after_s must not be negative: got {self.release_after_s}"
            )

    @property
    def restarts(self) -> bool:
        """Whether failed workers are started again."""
        return False

    def retries(self, method_name: str) -> bool:
        """Whether a call of this method is made again after a restart."""
        del method_name
        return False


@dataclass(frozen=True, kw_only=True)
class FailFast(FailurePolicy):
    """Raise the failure and do not restart the worker.

    Further calls that need it raise the same failure at once. Workers outside of its
    process group keep running and can still be called, for instance to save their
    state.
    """


@dataclass(frozen=True, kw_only=True)
class Restart(FailurePolicy):
    """Base of the policies that restart; use one of the subclasses."""

    max_restarts: int = 3
    """Number of restarts within `within_s` before the group gives up."""
    within_s: float = 3_600.0
    """The time over which restarts are counted."""
    backoff_s: float = 0.1
    """Pause before the second restart in that time; doubled for each further one."""
    max_backoff_s: float = 30.0
    """Longest pause."""
    retry_calls: bool | Collection[str] = False
    """Methods that may run twice: their call is retried after the restart, on the
    restarted workers (`RestartWorker`) or on all (`RestartGroup`), without the caller
    noticing. Names, or True for all. A call of any other method raises the failure
    after the restart. Generator methods are never retried: their items may have been
    consumed."""
    on_restart: RestoreState | None = None
    """Called as `on_restart(group, ranks)` with the restarted ranks, in the thread that
    makes or waits for a call, before the call is retried or the failure raised. It
    restores their state by calls of the group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.max_restarts, bool) or self.max_restarts < 1:
            raise ConfigError(
                f"max_restarts must be at least 1: got {self.max_restarts!r}; use "
                "FailFast for no restart"
            )
        for name in ("within_s", "backoff_s", "max_backoff_s"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name} must not be negative: got {value}")
        # On a string, `in` would also match substrings, as 'step' in 'steps'.
        if isinstance(self.retry_calls, str):
            raise ConfigError(
                "retry_calls must be True, False or names of methods: got the string "
                f"{self.retry_calls!r}; write [{self.retry_calls!r}]"
            )

    @property
    def restarts(self) -> bool:
        """Whether failed workers are started again: yes."""
        return True

    def retries(self, method_name: str) -> bool:
        """Whether a call of this method is made again; see `retry_calls`."""
        if isinstance(self.retry_calls, bool):
            return self.retry_calls
        return method_name in self.retry_calls

    def ends_all(self) -> bool:
        """Return whether workers that have not failed are started again as well."""
        return False

    def pause_before(self, restarts: Sequence[float]) -> float | None:
        """Seconds to wait before the next restart.

        Args:
            restarts: when there were restarts before (`time.monotonic`).

        Returns:
            None where there were as many as may be.
        """
        now = time.monotonic()
        recent = sum(1 for at in restarts if now - at <= self.within_s)
        if recent >= self.max_restarts:
            return None
        if recent == 0:
            return 0.0
        return min(self.max_backoff_s, doubled(self.backoff_s, recent - 1))


@dataclass(frozen=True, kw_only=True)
class RestartWorker(Restart):
    """Restart failed workers and those that were terminated along with them.

    For workers that do not talk to each other. If the failed worker was in a process
    group, all of its members are restarted; if these are all workers of the group, they
    get a new MASTER_PORT.
    """


@dataclass(frozen=True, kw_only=True)
class RestartGroup(Restart):
    """Restart all workers with a new MASTER_PORT."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_node_lost == "shrink":
            raise ConfigError(
                "on_node_lost 'shrink' is for workers that do not need each other: got "
                "RestartGroup, which restarts all of them; use RestartWorker, or shut "
                "the group down and make a smaller one on the bundles that have a node "
                "(RayVirtualCluster.find_bundles)"
            )

    def ends_all(self) -> bool:
        """Return whether workers that have not failed are started again too: yes."""
        return True
