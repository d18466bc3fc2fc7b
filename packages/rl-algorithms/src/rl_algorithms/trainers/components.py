"""The parts that a run consists of: built in order, closed in reverse.

| part        | made of                     | lives in                           |
|-------------|-----------------------------|------------------------------------|
| cluster     | `cluster`                   | placement groups of Ray            |
| policy      | `policy`                    | training workers                   |
| critic      | `critic`                    | further training workers           |
| teacher     | `teacher`                   | further workers that train nothing |
| generation  | `policy.generation`         | generation workers, same bundles   |
| environment | `env`, a function, an object | a Ray actor, or the driver if given |
| sync        | policy and generation       | the driver                         |
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

import rl_envs
import rl_models
from rl_algorithms.trainers.config import TrainerConfig
from rl_algorithms.trainers.pool import WorkerPool
from rl_algorithms.trainers.signals import SignalGuard
from rl_distributed.errors import ConfigError
from rl_distributed.logging import get_logger
from rl_distributed.ray_start import init_ray
from rl_distributed.virtual_cluster import RayVirtualCluster
from rl_envs.reward_lists import RewardFns
from rl_models.config import PolicyConfig
from rl_models.policy.preflight import check_policy
from rl_models.tokens.tokenizer import load_tokenizer

__all__ = ["Components", "Needs", "resume_paths", "start_components"]

_logger = get_logger(__name__)
_POLL_S = 0.05


@dataclass(frozen=True)
class Needs:
    """Which components an algorithm uses."""

    generation: bool = False
    """It samples."""
    environment: bool = False
    """It scores what it samples."""
    reference_policy: bool = False
    """It compares with the initial weights."""
    critic: bool = False
    """It trains a second model, that of the section `critic`."""
    teacher: bool = False
    """It asks a frozen model, that of the section `teacher`."""


@dataclass(frozen=True)
class Components:
    """The parts; None where there is none."""

    cluster: Any = None
    policy: Any = None
    generation: Any = None
    environment: Any = None
    tokenizer: Any = None
    sync: Any = None
    critic: Any = None
    teacher: Any = None


def choose_environment(
    config: TrainerConfig,
    reward_fn: RewardFns | None,
    environment: Any,
) -> Any:
    """Return what scores answers: a function, an object, or the section `env`.

    Raises:
        ConfigError: There is none, or more than one.
    """
    given = {
        "reward_fn": reward_fn,
        "environment": environment,
        "config section env": config.env,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1 and named != ["environment", "config section env"]:
        raise ConfigError(f"{' and '.join(named)} exclude each other: give one of them")
    return next((value for value in given.values() if value is not None), None)


def check_components(config: TrainerConfig, given: Components, needs: Needs) -> None:
    """Find what can be known to be wrong before anything is started.

    Raises:
        UserError: A model folder, a backend, an environment or a size.
    """
    if given.policy is None:
        check_policy(config.policy, config.num_ranks)
    if needs.critic and given.critic is None:
        check_policy(_section(config, "critic"), config.num_ranks)
    if needs.teacher and given.teacher is None:
        check_policy(_section(config, "teacher"), config.num_ranks)
    if needs.generation and given.generation is None:
        if config.policy.generation is None:
            raise ConfigError(
                "policy.generation is null, but the run samples: give it max_new_tokens"
            )
        if config.policy.generation.backend != "auto":
            rl_models.get_generation_backend(config.policy.generation.backend)
    if needs.environment and config.env is not None:
        rl_envs.env_registry.get(config.env.name)


def with_tokenizer(given: Components, config: TrainerConfig) -> Components:
    """Load the model's tokenizer, unless one was given."""
    if given.tokenizer is not None:
        return given
    settings = config.policy.tokenizer
    name = settings.name or config.policy.model_name
    return replace(given, tokenizer=load_tokenizer(name, settings.chat_template))


class _Starter:
    """Starts components and registers how each is closed."""

    def __init__(self, config: TrainerConfig, closing: ExitStack) -> None:
        self._config = config
        self._closing = closing

    def close_later(self, name: str, close: Callable[[], Any]) -> None:
        """Close a component at the end, whatever happens to the others."""

        def close_quietly() -> None:
            try:
                close()
            except Exception:
                _logger.exception("closing the %s failed", name)

        self._closing.callback(close_quietly)

    def cluster(self, num_groups: int, signals: SignalGuard) -> Any:
        """Start Ray if it is not up, and section off a cluster."""
        if not ray.is_initialized():
            signals.raise_pending()
            if init_ray(tls=self._config.cluster.tls):
                self.close_later("local Ray cluster", ray.shutdown)
            signals.install()  # Ray has set its own handlers
            signals.raise_pending()
        cluster = RayVirtualCluster.from_config(
            self._config.cluster, max_colocated_worker_groups=num_groups
        )
        self.close_later("cluster", cluster.shutdown)
        return cluster

    def policy(
        self, cluster: Any, reference: bool, checkpoint: Path | None, kept: Any
    ) -> Any:
        """Start the training workers, or load the model into those that are there."""
        weights, optimizer = resume_paths(checkpoint)
        settings: dict[str, Any] = {
            "init_reference_model": reference,
            "weights_path": weights,
            "optimizer_path": optimizer,
        }
        if kept is not None:
            kept.reload(self._config.policy, **settings)
            return kept
        policy = rl_models.TrainingPolicy(cluster, self._config.policy, **settings)
        self.close_later("policy", policy.shutdown)
        return policy

    def further_policy(
        self, name: str, cluster: Any, checkpoint: Path | None, kept: Any
    ) -> Any:
        """Start the training workers of another model, from the section of its name."""
        config = _section(self._config, name)
        weights, optimizer = resume_paths(checkpoint, name)
        if kept is not None:
            kept.reload(config, weights_path=weights, optimizer_path=optimizer)
            return kept
        policy = rl_models.TrainingPolicy(
            cluster,
            config,
            weights_path=weights,
            optimizer_path=optimizer,
            name_prefix=name,
        )
        self.close_later(name, policy.shutdown)
        return policy

    def generation(self, cluster: Any, kept: Any) -> Any:
        """Start the generation workers, or load the model into those that are there."""
        policy = self._config.policy
        assert policy.generation is not None
        settings: dict[str, Any] = {
            "model_name": policy.model_name,
            "tokenizer_name": policy.tokenizer.name,
            "hf_config_overrides": policy.hf_config_overrides,
            # The first weights come from the trainer, like all others.
            "load_weights": False,
        }
        if kept is not None:
            kept.reload(policy.generation, **settings)
            return kept
        generation = rl_models.GenerationPolicy(cluster, policy.generation, **settings)
        self.close_later("generation", generation.shutdown)
        return generation

    def environment(self, chosen: Any) -> Any:
        """Start the environment in an actor; an object is used where it is."""
        if _is_environment(chosen):
            return chosen
        settings = self._config.env
        if chosen is not settings:
            remote = rl_envs.RemoteEnvironment(chosen)
        else:
            assert settings is not None
            remote = rl_envs.RemoteEnvironment(
                settings.name,
                settings.settings,
                num_workers=settings.num_workers,
                num_cpus=settings.num_cpus,
                deadline_s=settings.deadline_s,
            )
        self.close_later("environment", remote.shutdown)
        return remote


def start_components(
    config: TrainerConfig,
    given: Components,
    needs: Needs,
    closing: ExitStack,
    *,
    checkpoint: Path | None,
    environment: Any,
    signals: SignalGuard,
    pool: WorkerPool | None = None,
) -> Components:
    """Start what an algorithm needs and was not given; worker groups start together.

    Args:
        config: The run's configuration.
        given: Components to use as they are.
        needs: What the algorithm uses.
        closing: Gets the calls that close what is started here.
        checkpoint: Where the policy's weights and optimizer state come from.
        environment: What `choose_environment` chose.
        signals: Asked while the worker groups start; a signal ends their start.
        pool: Keeps what is started here for the next trainer, and has what the last
            one left.

    Raises:
        Interrupted: A signal came.
    """
    starter = _Starter(config, closing if pool is None else pool.closing)
    jobs: dict[str, Callable[[], Any]] = {}
    cluster = given.cluster
    num_groups = 1 + needs.generation + needs.critic + needs.teacher
    kept: dict[str, Any] = {}
    if pool is not None:
        kept = pool.kept_for(config.cluster, num_groups)
        cluster = cluster or kept.get("cluster")
    if cluster is None and _starts_anything(given, needs, environment):
        cluster = starter.cluster(num_groups, signals)
    starts: dict[str, Callable[[], Any]] = {
        "policy": lambda: starter.policy(
            cluster, needs.reference_policy, checkpoint, kept.get("policy")
        )
    }
    if needs.critic:
        starts["critic"] = lambda: starter.further_policy(
            "critic", cluster, checkpoint, kept.get("critic")
        )
    jobs |= _start_or_resume(starts, given, checkpoint)
    if needs.teacher and given.teacher is None:
        # It is never trained, so no checkpoint has it.
        jobs["teacher"] = lambda: starter.further_policy(
            "teacher", cluster, None, kept.get("teacher")
        )
    if needs.generation and given.generation is None:
        jobs["generation"] = lambda: starter.generation(cluster, kept.get("generation"))
    if needs.environment:
        if pool is not None and pool.keeps_environment(config.env):
            given = replace(given, environment=kept["environment"])
        else:
            jobs["environment"] = lambda: starter.environment(environment)
    abandon = [kept.clear]
    if cluster is not given.cluster:
        abandon.append(cluster.shutdown)
    started = _run_all(jobs, signals, abandon)
    parts = replace(given, cluster=cluster, **started)
    kept |= {**started, "cluster": cluster}
    if needs.generation:
        sync = rl_models.WeightSynchronizer(parts.policy, parts.generation)
        starter.close_later("weight sync", sync.close)
        parts = replace(parts, sync=sync)
    return parts


def _start_or_resume(
    starts: dict[str, Callable[[], Any]], given: Components, checkpoint: Path | None
) -> dict[str, Callable[[], Any]]:
    """Return what starts the models that were not given; the others are resumed."""
    for name in starts:
        if _has(given, name) and checkpoint is not None:
            getattr(given, name).load_checkpoint(*resume_paths(checkpoint, name))
    return {name: start for name, start in starts.items() if not _has(given, name)}


def _starts_anything(given: Components, needs: Needs, environment: Any) -> bool:
    """Whether a process must be started."""
    parts = {
        "policy": True,
        "generation": needs.generation,
        "critic": needs.critic,
        "teacher": needs.teacher,
    }
    missing = [n for n, is_needed in parts.items() if is_needed and not _has(given, n)]
    local_env = environment is None or _is_environment(environment)
    return bool(missing) or not local_env


def _has(given: Components, name: str) -> bool:
    return getattr(given, name) is not None


def _section(config: TrainerConfig, name: str) -> PolicyConfig:
    """Return the section of a further model."""
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
            "%s has no optimizer state: the optimizer starts afresh", checkpoint
        )
        return checkpoint / name / "weights", None
    return checkpoint / name / "weights", optimizer


def _is_environment(chosen: Any) -> bool:
    """Tell an environment object (by its method) from a function and a section."""
    return callable(getattr(chosen, "step", None)) and not isinstance(chosen, type)


def _run_all(
    jobs: dict[str, Callable[[], Any]],
    signals: SignalGuard,
    abandon: list[Callable[[], Any]],
) -> dict[str, Any]:
    """Run jobs at the same time; the first error wins, after all have ended.

    A signal calls all of `abandon`, which makes the jobs fail; they are waited for,
    because a thread that is left behind would use what is closed next.
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
