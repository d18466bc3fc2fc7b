"""Start of each component of a run, several at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeGuard, cast

import ray

import rl_envs
import rl_models
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.settings.config import EnvConfig, TrainerConfig
from rl_algorithms.trainers.setup.early_ray import adopt_early_ray
from rl_distributed.checkpoint.memory import FolderInMemory
from rl_distributed.cluster.config import ClusterSize
from rl_distributed.cluster.resources import check_clusters
from rl_distributed.cluster.start import init_ray, live_nodes, shutdown_ray
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.logs.logging import get_logger
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.rewards.lists import RewardFns
from rl_models.config import PolicyConfig
from rl_models.interfaces import GenerationInterface, PolicyInterface
from rl_models.policy.elastic_ranks import ElasticRanks

__all__ = [
    "Scorer",
    "Starter",
    "is_environment",
    "resume_paths",
    "run_all",
    "section_of",
]

_logger = get_logger(__name__)
_POLL_S = 0.05


Scorer = RewardFns | EnvironmentInterface[Any] | EnvConfig
"""Anything that scores answers: reward functions, an environment, or section `env`."""


class Starter:
    """Starts components and registers their shutdown."""

    def __init__(self, config: TrainerConfig, closing: ExitStack) -> None:
        self._config = config
        self._closing = closing

    def close_later(self, name: str, close: Callable[[], Any]) -> None:
        """Register the shutdown of a component, independent of errors in others."""

        def close_quietly() -> None:
            try:
                close()
            except Exception:
                _logger.exception("closing the %s failed", name)

        self._closing.callback(close_quietly)

    def cluster(
        self, num_groups: int, to_start: Sequence[str], signals: SignalGuard
    ) -> RayVirtualCluster:
        """Start Ray if it is not running, and reserve a cluster.

        Args:
            num_groups: Number of worker groups that may share it.
            to_start: Names of those that are started on it.
            signals: Signal guard.

        Raises:
            ResourceInsufficientError: There is no room for it beside the generator's
                own.
        """
        started = adopt_early_ray()
        if not ray.is_initialized():
            signals.raise_pending()
            settings = self._config.cluster
            started = init_ray(tls=settings.tls, pass_env=settings.pass_env)
            signals.install()  # Ray has set its own handlers
        if started:
            self.close_later("local Ray cluster", shutdown_ray)
        signals.raise_pending()
        apart = self._config.sampling_cluster
        if apart is not None and to_start:
            both: dict[str, tuple[ClusterSize, Sequence[str]]] = {
                "cluster": (self._config.cluster, to_start),
                "generation_cluster": (apart, ["generation"]),
            }
            check_clusters(both, live_nodes())
        cluster = RayVirtualCluster.from_config(
            self._config.cluster, max_colocated_worker_groups=num_groups
        )
        self.close_later("cluster", cluster.shutdown)
        return cluster

    def sampling_cluster(self) -> RayVirtualCluster | None:
        """Return the generator's own cluster, if the configuration has one."""
        size = self._config.sampling_cluster
        if size is None:
            return None
        cluster = RayVirtualCluster.from_config(
            size, name="generation_cluster", max_colocated_worker_groups=1
        )
        self.close_later("generation_cluster", cluster.shutdown)
        return cluster

    @property
    def _elastic(self) -> ElasticRanks:
        settings = self._config.fault_tolerance
        return ElasticRanks(
            on_node_lost=settings.on_node_lost,
            min_ranks=settings.min_workers,
            deadline_s=settings.node_deadline_s,
        )

    def policy(
        self,
        cluster: RayVirtualCluster,
        reference: bool,
        checkpoint: Path | None,
        kept: rl_models.TrainingPolicy | None,
        snapshot: FolderInMemory | None = None,
    ) -> PolicyInterface:
        """Start the training workers, or load the model into kept ones.

        Args:
            cluster: Where they run.
            reference: Keep a frozen copy of the initial model.
            checkpoint: Checkpoint of the run to start from; None: the initial model.
            kept: Workers to load it into.
            snapshot: Start kept workers from it in place of the checkpoint.
        """
        config = self._config.policy
        settings = {
            "init_reference_model": reference,
            **_source(checkpoint, "policy", snapshot),
        }
        if kept is not None:
            kept.reload(config, **settings)
            return kept
        policy = rl_models.TrainingPolicy(
            cluster, config, elastic=self._elastic, **settings
        )
        self.close_later("policy", policy.shutdown)
        return policy

    def further_policy(
        self,
        name: str,
        cluster: RayVirtualCluster,
        checkpoint: Path | None,
        kept: rl_models.TrainingPolicy | None,
        snapshot: FolderInMemory | None = None,
    ) -> PolicyInterface:
        """Start the training workers of another model, from the section of its name.

        See `policy` for the arguments.
        """
        config = section_of(self._config, name)
        settings = _source(checkpoint, name, snapshot)
        if kept is not None:
            kept.reload(config, **settings)
            return kept
        policy = rl_models.TrainingPolicy(
            cluster, config, name_prefix=name, elastic=self._elastic, **settings
        )
        self.close_later(name, policy.shutdown)
        return policy

    def generation(
        self,
        cluster: RayVirtualCluster,
        kept: rl_models.GenerationPolicy | None,
        first: RayVirtualCluster | None = None,
    ) -> GenerationInterface:
        """Start the generation workers, or load the model into kept ones.

        Args:
            cluster: Where they run.
            kept: Workers to load it into.
            first: Another cluster to place before; it also starts Ray by its settings.
        """
        if first is not None and first is not cluster and kept is None:
            first.place()
        policy = self._config.policy
        assert policy.generation is not None
        settings: dict[str, Any] = {
            "model_name": policy.model_name,
            "tokenizer_name": policy.tokenizer.name,
            "hf_config_overrides": policy.hf_config_overrides,
            "adapter": policy.sent_adapter,
            "updates_in_flight": self._config.updates_in_flight,
            # The first sync brings the weights, so reading them here would be wasted.
            "load_weights": False,
        }
        if kept is not None:
            kept.reload(policy.generation, **settings)
            return kept
        generation = rl_models.GenerationPolicy(cluster, policy.generation, **settings)
        self.close_later("generation", generation.shutdown)
        return generation

    def environment_here(self, chosen: Scorer) -> EnvironmentInterface[Any]:
        """Create an environment from reward functions in this process."""
        if is_environment(chosen):
            return chosen
        environment = rl_envs.FunctionalRewardWrapper(cast("RewardFns", chosen))
        self.close_later("environment", environment.shutdown)
        return environment

    def environment(self, chosen: Scorer | None) -> EnvironmentInterface[Any]:
        """Start the environment in workers; an environment object is used in place."""
        if is_environment(chosen):
            return chosen
        settings = self._config.env
        if chosen is not settings:
            remote = rl_envs.RemoteEnvironment(cast("RewardFns", chosen))
        else:
            assert settings is not None
            remote = rl_envs.RemoteEnvironment(
                settings.name,
                settings.settings,
                num_workers=settings.num_workers,
                num_cpus=settings.num_cpus,
                deadline_s=settings.deadline_s,
                env_vars=settings.passed(),
                max_restarts=settings.max_restarts,
                task_limits=settings.limits,
            )
        self.close_later("environment", remote.shutdown)
        return remote


def section_of(config: TrainerConfig, name: str) -> PolicyConfig:
    """Return the section of a second model."""
    section: PolicyConfig = getattr(config, name)
    return section


def resume_paths(
    checkpoint: Path | None, name: str = "policy"
) -> tuple[Path | None, Path | None]:
    """Return the folders of weights and training state in a checkpoint."""
    if checkpoint is None:
        return None, None
    optimizer = checkpoint / name / "optimizer"
    if not optimizer.exists():
        _logger.warning(
            "%s has no optimizer state: the optimizer starts from scratch", checkpoint
        )
        return checkpoint / name / "weights", None
    return checkpoint / name / "weights", optimizer


def _source(
    checkpoint: Path | None, name: str, snapshot: FolderInMemory | None
) -> dict[str, Any]:
    """Return the arguments of a policy that say what it starts from."""
    if snapshot is not None:
        return {"snapshot": snapshot}
    weights, optimizer = resume_paths(checkpoint, name)
    return {"weights_path": weights, "optimizer_path": optimizer}


def is_environment(chosen: object) -> TypeGuard[EnvironmentInterface[Any]]:
    """Return whether an object is an environment, by its method `step`."""
    return callable(getattr(chosen, "step", None)) and not isinstance(chosen, type)


def run_all(
    jobs: dict[str, Callable[[], Any]],
    signals: SignalGuard,
    abandon: list[Callable[[], object]],
) -> dict[str, Any]:
    """Run jobs in parallel; raise the first error after all have ended.

    A signal calls all of `abandon`, which makes the jobs fail. They are still waited
    for, because a thread left behind would use components that are closed next.
    """
    if not jobs:
        return {}
    with ThreadPoolExecutor(len(jobs), thread_name_prefix="start") as executor:
        futures: dict[str, Future[Any]] = {
            name: executor.submit(job) for name, job in jobs.items()
        }
        while wait(futures.values(), timeout=_POLL_S).not_done:
            if signals.pending is not None:
                for give_up in abandon:
                    give_up()
                break
    signals.raise_pending()
    return {name: future.result() for name, future in futures.items()}
