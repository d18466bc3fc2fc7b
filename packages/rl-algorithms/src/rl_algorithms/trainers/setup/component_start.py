"""Start of a run's components: built in order, closed in reverse order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import rl_models
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.setup.components import Components, Needs, present
from rl_algorithms.trainers.setup.kept_workers import KeptWorkers
from rl_algorithms.trainers.setup.own_policy import OwnPolicy
from rl_algorithms.trainers.setup.starting import (
    Scorer,
    Starter,
    is_environment,
    resume_paths,
    run_all,
)
from rl_envs.interfaces import EnvironmentInterface
from rl_models.interfaces import GenerationInterface, PolicyInterface

if TYPE_CHECKING:
    from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
    from rl_models.weights.protocols import WeightSource

__all__ = ["start_components"]


def start_components(
    config: TrainerConfig,
    given: Components,
    needs: Needs,
    closing: ExitStack,
    *,
    checkpoint: Path | None,
    environment: Scorer | None,
    signals: SignalGuard,
    pool: KeptWorkers | None = None,
) -> Components:
    """Start the components that are needed and not given, worker groups in parallel.

    Args:
        config: The run's configuration.
        given: Components to use as they are.
        needs: Components that the algorithm uses.
        closing: Exit stack that closes the started components.
        checkpoint: Checkpoint with weights and optimizer state; None for a new run.
        environment: Choice of `choose_environment`.
        signals: Signal guard; a signal ends the start of the worker groups.
        pool: Pool that keeps the started components for the next trainer, and holds
            those of the last one.

    Raises:
        Interrupted: A signal came.
    """
    starter = Starter(config, closing if pool is None else pool.closing)
    all_needs, needs = needs, needs.of_workers(config, given)
    given, environment = _one_process(config, given, needs, environment, starter)
    jobs: dict[str, Callable[[], Any]] = {}
    further = ("generation", "critic", "teacher")
    groups = ("policy", *(name for name in further if getattr(needs, name)))
    kept: dict[str, Any] = {}
    if pool is not None:
        kept = pool.kept_for(config.cluster, groups, config.sampling_cluster)
    cluster = given.cluster or kept.get("cluster")
    if cluster is None and _starts_anything(given, needs, environment):
        on_cluster = needs.on_cluster(config)
        num_groups = len(groups) if on_cluster == needs else len(groups) - 1
        to_start = on_cluster.groups_to_start(given)
        cluster = starter.cluster(num_groups, to_start, signals)
    starts: dict[str, Callable[[], Any]] = {
        "policy": lambda: starter.policy(
            present(cluster, "cluster"),
            needs.reference_policy,
            checkpoint,
            kept.get("policy"),
        )
    }
    if needs.critic:
        starts["critic"] = lambda: starter.further_policy(
            "critic", present(cluster, "cluster"), checkpoint, kept.get("critic")
        )
    jobs |= _start_or_resume(starts, given, checkpoint)
    if needs.teacher and given.teacher is None:
        # Never trained, so no checkpoint has it.
        jobs["teacher"] = lambda: starter.further_policy(
            "teacher", present(cluster, "cluster"), None, kept.get("teacher")
        )
    sampling_cluster: RayVirtualCluster | None = kept.get("generation_cluster")
    if needs.generation and given.generation is None:
        sampling_cluster = sampling_cluster or starter.sampling_cluster() or cluster
        # In the order of `check_clusters`, as each may take room that only the other
        # could not do without.
        first = cluster if needs.on_cluster(config).groups_to_start(given) else None
        jobs["generation"] = lambda: starter.generation(
            present(sampling_cluster, "cluster"), kept.get("generation"), first
        )
    if needs.environment:
        left = _left_environment(config, environment, pool)
        if left is not None:
            given = replace(given, environment=left)
        else:
            jobs["environment"] = lambda: starter.environment(environment)
    # After a signal the kept components are half reloaded: none may be used again.
    own = [each for each in (cluster, sampling_cluster) if each is not given.cluster]
    abandon: list[Callable[[], object]] = [kept.clear]
    abandon += [each.shutdown for each in own if each is not None]
    started = _run_all(jobs, signals, abandon, pool)
    parts = replace(given, cluster=cluster, **started)
    # An environment object belongs to its creator, and is not kept for later trainers.
    kept |= {n: part for n, part in started.items() if part is not environment}
    kept |= {"cluster": cluster, "generation_cluster": sampling_cluster}
    if all_needs.shares(config, given):
        # The policy has the methods of a generator, and needs no weights sent to it.
        sampler = cast("GenerationInterface", parts.required.policy)
        return replace(parts, generation=sampler)
    return _with_sync(parts, starter) if needs.generation else parts


def _run_all(
    jobs: dict[str, Callable[[], Any]],
    signals: SignalGuard,
    abandon: list[Callable[[], object]],
    pool: KeptWorkers | None,
) -> dict[str, Any]:
    try:
        return run_all(jobs, signals, abandon)
    except BaseException:
        # What has started is known to nobody, and would hold its machines while the
        # next trainer waits for them.
        if pool is not None:
            pool.release()
        raise


def _with_sync(parts: Components, starter: Starter) -> Components:
    policy, generation = parts.required.policy, parts.required.generation
    # As plain objects, because the declared types seem to rule identity out.
    both: tuple[object, object] = (policy, generation)
    if both[0] is both[1]:
        return parts
    # A policy that cannot send its weights samples by itself (`samples_itself`), so
    # this one can.
    source = cast("WeightSource", policy)
    sync = rl_models.WeightSynchronizer(source, generation)
    starter.close_later("weight sync", sync.close)
    return replace(parts, sync=sync)


def _one_process(
    config: TrainerConfig,
    given: Components,
    needs: Needs,
    environment: Scorer | None,
    starter: Starter,
) -> tuple[Components, Scorer | None]:
    """Use a policy that samples by itself as generator, and score in this process."""
    if not needs.samples_with(given):
        return given, environment
    assert config.policy.generation is not None
    own = OwnPolicy(given.required.policy, config.policy.generation.sampling_params())
    if environment is not None and environment is not config.env:
        environment = starter.environment_here(environment)
    # It stands for both: methods that it lacks are forwarded to the policy.
    return replace(
        given,
        policy=cast("PolicyInterface", own),
        generation=cast("GenerationInterface", own),
    ), environment


def _start_or_resume(
    starts: dict[str, Callable[[], Any]], given: Components, checkpoint: Path | None
) -> dict[str, Callable[[], Any]]:
    """Resume the given models, and return the calls that start the others."""
    for name in starts:
        if given.has(name) and checkpoint is not None:
            getattr(given, name).load_checkpoint(*resume_paths(checkpoint, name))
    return {name: start for name, start in starts.items() if not given.has(name)}


def _left_environment(
    config: TrainerConfig, chosen: Scorer | None, pool: KeptWorkers | None
) -> EnvironmentInterface[Any] | None:
    """Return the environment of the last trainer, if it has the same section."""
    section = config.env if chosen is config.env else None
    if pool is None or not pool.keeps_environment(section):
        return None
    environment: EnvironmentInterface[Any] = pool.parts["environment"]
    return environment


def _starts_anything(
    given: Components, needs: Needs, environment: Scorer | None
) -> bool:
    """Return whether any process has to be started."""
    local_env = environment is None or is_environment(environment)
    return bool(needs.groups_to_start(given)) or not local_env
