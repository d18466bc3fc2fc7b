"""A virtual cluster that an object creates for itself if it is given none.

Ray is started where it is not up. A Ray that was started so ends with its last user:
the one that is closed while no actor is left ends Ray; otherwise the end of the process
does.
"""

from __future__ import annotations

import threading

import ray
from ray._private import state

from rl_distributed.cluster.start import init_ray, shutdown_ray
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.cluster.watch import find_loss

__all__ = ["OwnCluster"]

# Keeps each check and the start or end that follows it together.
_lock = threading.Lock()
# Address of the Ray cluster that was started for an `OwnCluster`.
_started: set[str] = set()


class OwnCluster:
    """Bundles on this machine for one worker group, and Ray if it is not up.

    Args:
        num_workers: bundles.
        name: what messages call the cluster.
    """

    def __init__(self, num_workers: int = 1, *, name: str = "") -> None:
        with _lock:
            if init_ray():
                _started.add(_address())
        self.cluster = RayVirtualCluster(
            # Only one group uses these bundles, so it gets them whole.
            [num_workers],
            max_colocated_worker_groups=1,
            name=name,
        )

    def shutdown(self) -> None:
        """Give the bundles back; end Ray if an `OwnCluster` started it and it is idle.

        Call it when the workers have ended; it may be called more than once.
        """
        self.cluster.shutdown()
        with _lock:
            # Without its head, Ray would terminate the program when asked for actors.
            if not ray.is_initialized() or find_loss() is not None:
                return
            if _address() in _started and not _has_actors():
                _started.discard(_address())
                shutdown_ray()


def _address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _has_actors() -> bool:
    """Whether some group, environment or queue still lives in the cluster."""
    states = ("ALIVE", "PENDING_CREATION", "RESTARTING", "DEPENDENCIES_UNREADY")
    return any(state.actors(actor_state_name=name) for name in states)
