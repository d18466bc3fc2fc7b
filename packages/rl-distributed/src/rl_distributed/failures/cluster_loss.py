"""`ClusterLoss`: a process of Ray that every program needs has ended."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

__all__ = ["RECONNECT_S", "ClusterLoss", "RayProcess", "reconnect_s"]

RayProcess = Literal["gcs_server", "raylet"]

RECONNECT_S = 60.0
"""How long Ray lets a program go on without its head, by default."""
_RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
# Share of that time after which waits give up, while the program can still save.
_PATIENCE = 0.6

_MEANING: dict[RayProcess, str] = {
    "gcs_server": (
        "its head process, which knows all nodes, workers and placement groups, "
        "{how}. Workers that run still answer, but none can be started, and Ray ends "
        "this program {limit_s:g} s after that"
    ),
    "raylet": (
        "its node process, which starts and feeds the workers of this machine, "
        "{how}. These workers cannot be reached any more"
    ),
}


@dataclass(frozen=True, slots=True)
class ClusterLoss:
    """A process of Ray without which no program can go on has ended."""

    process: RayProcess
    """`gcs_server` is the head of the cluster, `raylet` Ray's process of a node."""
    pid: int | None
    """None: it ran where this process cannot see it."""
    address: str
    """`host:port` of the head."""
    how: str
    """How it ended, as far as that is known."""
    at: float
    """`time.monotonic()` when it was noticed."""

    @property
    def workers_answer(self) -> bool:
        """Whether workers that are up can still be called, for some time."""
        return self.process == "gcs_server"

    @property
    def waits_give_up_at(self) -> float:
        """`time.monotonic()` from which waits for results end with an error."""
        return self.at + _PATIENCE * reconnect_s() if self.workers_answer else self.at

    def __str__(self) -> str:
        pid = "" if self.pid is None else f", pid {self.pid}"
        how = f"({self.process}{pid}, cluster {self.address}) {self.how}"
        text = _MEANING[self.process].format(how=how, limit_s=reconnect_s())
        return f"the Ray cluster is lost: {text}"


def reconnect_s() -> float:
    """Return how long Ray goes on without its head.

    Users set it higher where the head may come back, as in Kubernetes.
    """
    with suppress(ValueError):
        return float(os.environ.get(_RECONNECT_VARIABLE, ""))
    return RECONNECT_S
