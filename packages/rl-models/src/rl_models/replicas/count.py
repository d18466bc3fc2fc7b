"""Changing how many replicas of a generator serve, between its calls."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import DeadlineExceededError
from rl_distributed.logs.logging import get_logger
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.generation.config import GenerationConfig
from rl_models.replicas.replicas import Replicas
from rl_models.replicas.workers import ReplicaWorkers, replica_layout

__all__ = ["ReplicaCount", "Uses"]

_logger = get_logger(__name__)


class Uses:
    """Lets calls run at the same time, and one that needs to be alone wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_calls = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Make a call; one that is alone ends first."""
        with self._changed:
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, deadline_s: float) -> Iterator[None]:
        """Wait for the calls that run; later ones wait for the end of the block.

        Raises:
            DeadlineExceededError: They did not end in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_calls, deadline_s):
                raise DeadlineExceededError(
                    f"{self._num_calls} calls of generate did not end within "
                    f"{deadline_s:g} s, so the number of replicas stays what it was"
                )
            yield


class ReplicaCount(ABC):
    """The part of `GenerationPolicy` that changes the number of its replicas."""

    config: GenerationConfig
    group: RayWorkerGroup
    workers: ReplicaWorkers
    replicas: Replicas
    _cluster: RayVirtualCluster
    _hosting: Any
    _uses: Uses
    _version: int
    _refusal: str
    _is_resized: bool
    """Whether another number of replicas serves than the workers were started for."""

    @abstractmethod
    def _start(self) -> None:
        """Start the workers and have them load the model."""

    def resize(self, num_replicas: int | None) -> None:
        """Serve with another number of replicas.

        Calls of `generate` that run are waited for, so that a replica that is removed
        has finished its rows. One that is added has no weights: it serves from the next
        weight update on (`WeightSynchronizer.sync_weights`, or `restore_weights` where
        the trainer's weights have not changed). Beyond the number that it was started
        with, all replicas are restarted.

        Args:
            num_replicas: How many; None: one per bundle of the cluster.

        Raises:
            ConfigError: There is no room for that number.
            DeadlineExceededError: A call did not end in time.
            WorkerStartError: A replica did not come up; the number is what it was.
        """
        wanted = self.check_num_replicas(num_replicas)
        config = self.config.replace(num_replicas=num_replicas)
        with self._uses.alone(config.call_deadline_s):
            if wanted <= self.workers.num_replicas:
                self.replicas.resize(wanted)
                self._is_resized = True
                self.config = config
            else:
                self._replace_workers(config)
        _logger.info("generation has %d replicas", wanted)

    def check_num_replicas(self, num_replicas: int | None) -> int:
        """Return how many replicas that means.

        Raises:
            ConfigError: There is no room for that number.
        """
        size = self._hosting.workers_per_replica
        layout = replica_layout(self._cluster, num_replicas, size)
        count: int = layout["sharding_annotations"].shape["data_parallel"]
        return count

    def _replace_workers(self, config: GenerationConfig) -> None:
        """Start a larger group in the place of the one that is there."""
        before = self.config
        self.replicas.close()
        self.group.shutdown(cleanup_method="shutdown")
        if self._version:
            # Whatever they load at their start is older than what was served.
            self._refusal = "the replicas were restarted and have no weights yet."
        self.config = config
        try:
            self._start()
        except BaseException:
            self.config = before
            self._start()
            raise
        self._is_resized = True
