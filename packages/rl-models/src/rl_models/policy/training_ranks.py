"""The workers of a training policy: started, called, and given another model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from rl_distributed.checkpoint.memory import FolderInMemory
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ActorEnvironmentError
from rl_distributed.logs.logging import get_logger
from rl_distributed.registrations import Registration
from rl_distributed.workers.builder import RayWorkerBuilder
from rl_distributed.workers.future import MultiWorkerFuture
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.checkpoint.hub import hub_secrets
from rl_models.config import PolicyConfig
from rl_models.parallelism import DATA_AXIS
from rl_models.policy.elastic_ranks import ElasticRanks, with_ranks
from rl_models.registry import training_registrations
from rl_models.training.traits import get_training_traits

__all__ = ["TrainingRanks"]

_logger = get_logger(__name__)


class TrainingRanks:
    """One worker per bundle of a cluster, which hold one model together.

    Args:
        cluster: Where they run.
        name: Name of the group of workers.
        config: The policy's config, checked.
        elastic: What to do if some bundles have no node.
        settings: The other arguments of `TrainingWorker`.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        name: str,
        config: PolicyConfig,
        elastic: ElasticRanks,
        **settings: Any,
    ) -> None:
        self._elastic = elastic
        self.num_setups = 0
        """Number of times that the ranks were given a model."""
        self._start(cluster, name, config, settings)

    def _start(
        self,
        cluster: RayVirtualCluster,
        name: str,
        config: PolicyConfig,
        settings: dict[str, Any],
        snapshot: FolderInMemory | None = None,
    ) -> None:
        """Start the workers and have them load the model."""
        bundles = self._find_bundles(cluster, config)
        self.num_ranks = cluster.world_size() if bundles is None else len(bundles)
        self._take(config)
        config = self.config
        self._process = _process_of(config)
        secrets, registrations, worker_class = self._process
        builder = RayWorkerBuilder(
            worker_class, config.to_dict(), registrations=registrations, **settings
        )
        try:
            self.group = RayWorkerGroup(
                cluster,
                builder.with_options(num_threads=config.num_threads),
                bundle_indices_list=bundles,
                name_prefix=name,
                env_vars=secrets,
                sharding_annotations=self._sharding,
                start_deadline_s=config.start_deadline_s,
            )
        except ActorEnvironmentError as error:
            module = worker_class.rpartition(".")[0]
            error.add_note(
                f"The backend {config.backend} runs in an environment of its own; "
                f"build it ahead of the run by: rl env build {module}"
            )
            raise
        try:
            if not cluster.use_gpus:
                self.group.warn_of_crowding(config.num_threads, f"{name}.num_threads")
            frees = self.call_all(
                "setup", deadline_s=config.start_deadline_s, snapshot=snapshot
            )
        except BaseException:
            # By force: ranks that have failed cannot shut down in an orderly way.
            self.group.shutdown(force=True)
            raise
        self.frees_memory = any(frees)
        """Whether workers free memory between their turns."""

    def _find_bundles(
        self, cluster: RayVirtualCluster, config: PolicyConfig
    ) -> list[tuple[int, list[int]]] | None:
        """Return the bundles to use, one for each rank; None: all of the cluster."""
        # This process cannot outlive its own node.
        own = ray.get_runtime_context().get_node_id()
        if all(slot.node_id == own for row in cluster.slots() for slot in row):
            return None
        found = self._elastic.bundles(cluster, config)
        if len(found) == cluster.world_size():
            return None
        _logger.warning(
            "training goes on with %d of %d ranks: no more have a node",
            *(len(found), cluster.world_size()),
        )
        return [(group, [bundle]) for group, bundle in found]

    @property
    def can_grow(self) -> bool:
        """Whether more ranks could train now than do, as nodes have come."""
        return self._elastic.can_grow(self.group.cluster, self.config, self.num_ranks)

    def _take(self, config: PolicyConfig) -> None:
        config = with_ranks(config, self.num_ranks)
        self.config = config
        self.num_setups += 1
        self.data_parallel_size = config.parallelism.data_size(self.num_ranks)
        """Number of shares that the rows of a batch are cut into."""
        traits = get_training_traits(config.backend)
        self._sharding = config.parallelism.sharding(
            self.num_ranks, stages_outermost=traits.stages_outermost(config)
        )

    def reload(
        self,
        config: PolicyConfig,
        snapshot: FolderInMemory | None = None,
        **settings: Any,
    ) -> None:
        """Have the workers load another model, in new processes if needed.

        Args:
            config: The policy's config, checked.
            snapshot: See `TrainingPolicy.reload`.
            settings: See the class.
        """
        # A process gets its secrets and the program's classes when it is started; and
        # the ranks stay in one process group, whose layout is fixed and which does not
        # outlive a member.
        is_same_process = _process_of(config) == self._process
        is_lost = self.is_lost
        layout = with_ranks(config, self.num_ranks).parallelism
        if (
            is_lost
            or not is_same_process
            or layout != self.config.parallelism
            or self.can_grow
        ):
            # Those that are left may wait for a lost one in a collective.
            self.group.shutdown(force=is_lost)
            cluster, name = self.group.cluster, self.group.name
            self._start(cluster, name, config, settings, snapshot)
            return
        self._take(config)
        frees = self.call_all(
            "setup",
            deadline_s=config.start_deadline_s,
            config=config.to_dict(),
            snapshot=snapshot,
            **settings,
        )
        self.frees_memory = any(frees)

    @property
    def is_lost(self) -> bool:
        """Whether a worker has died or was given up, so that no call can succeed."""
        return any(one.failure is not None for one in self.group.health())

    def call_all(self, method: str, deadline_s: float | None = None, **kw: Any) -> Any:
        """Call every rank and wait; return the results in the order of the ranks."""
        refs = self.group.run_all_workers_single_data(method, **kw)
        future = MultiWorkerFuture(list(refs), method_name=method)
        limit = deadline_s or self.config.call_deadline_s
        return self.group.get_all_worker_results(future, deadline_s=limit)

    def call_each(self, method: str, parts: Sequence[Any], **common: Any) -> list[Any]:
        """Call every rank with its own part; return the results in their order."""
        refs = self.group.run_all_workers_multiple_data(
            method, data=parts, common_kwargs=common
        )
        future = MultiWorkerFuture(list(refs), method_name=method)
        limit = self.config.call_deadline_s
        results: list[Any] = self.group.get_all_worker_results(future, deadline_s=limit)
        return results

    def call_sharded(
        self, method: str, shards: Sequence[Any], **common: Any
    ) -> list[Any]:
        """Call every rank with its share of the rows; return the results by share.

        Ranks that hold one model together get the same rows, which are stored once.
        """
        same_rows = self._sharding.names[1:]
        future = self.group.run_all_workers_sharded_data(
            method,
            in_sharded_axes=[DATA_AXIS],
            replicate_on_axes=same_rows,
            output_is_replicated=same_rows,
            common_kwargs=common,
            data=shards,
        )
        results: list[Any] = self.group.get_all_worker_results(
            future, deadline_s=self.config.call_deadline_s
        )
        return results

    def shutdown(self) -> bool:
        """End the workers; True if nothing went wrong."""
        return bool(self.group.shutdown(cleanup_method="shutdown"))


def _process_of(
    config: PolicyConfig,
) -> tuple[dict[str, str], tuple[Registration, ...], str]:
    """Return what cannot change in a process: secrets, registrations, worker class."""
    return (
        hub_secrets(config.model_name, config.tokenizer.name),
        training_registrations(config.backend),
        get_training_traits(config.backend).worker_class,
    )
