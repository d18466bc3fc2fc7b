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

A policy that was given and samples itself is the generation as well (`own_policy`):
there is no sync then, and a reward function is called in the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import rl_envs
import rl_models
from rl_algorithms.data.types import Tokenizer
from rl_algorithms.errors import AlgorithmError
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.setup.kept_workers import KeptWorkers
from rl_algorithms.trainers.setup.own_policy import (
    OwnPolicy,
    check_own_policy,
    samples_itself,
)
from rl_algorithms.trainers.setup.starting import (
    Scorer,
    Starter,
    is_environment,
    resume_paths,
    run_all,
    section_of,
)
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.rewards.lists import RewardFns
from rl_models.generation.traits import get_generation_traits
from rl_models.interfaces import GenerationInterface, PolicyInterface
from rl_models.policy.preflight import check_policy
from rl_models.policy.row_length import with_row_length
from rl_models.tokens.tokenizer import load_tokenizer
from rl_models.training.worker_sampler import shares_weights

if TYPE_CHECKING:
    from rl_models.weights.protocols import WeightSource

__all__ = [
    "Components",
    "Needs",
    "check_components",
    "choose_environment",
    "start_components",
    "with_row_lengths",
    "with_tokenizer",
]


ConfigT = TypeVar("ConfigT", bound=TrainerConfig)
PartT = TypeVar("PartT")


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

    def of_workers(self, config: TrainerConfig, given: Components) -> Needs:
        """Return the same without a generator that has no workers of its own."""
        return replace(self, generation=False) if self.shares(config, given) else self

    def shares(self, config: TrainerConfig, given: Components) -> bool:
        """Whether the workers that train the policy sample as well."""
        is_asked = self.generation and given.generation is None
        return is_asked and shares_weights(config.policy)


@dataclass(frozen=True)
class Components:
    """The parts; None where there is none."""

    cluster: RayVirtualCluster | None = None
    policy: PolicyInterface | None = None
    generation: GenerationInterface | None = None
    environment: EnvironmentInterface[Any] | None = None
    tokenizer: Tokenizer | None = None
    sync: rl_models.WeightSynchronizer | None = None
    critic: PolicyInterface | None = None
    teacher: PolicyInterface | None = None

    @property
    def required(self) -> RequiredComponents:
        """The same parts for steps that cannot do without."""
        return RequiredComponents(self)


class RequiredComponents:
    """Parts that an algorithm has asked for: one that is not there is an error."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts

    @property
    def policy(self) -> PolicyInterface:
        """The model that is trained."""
        return _present(self._parts.policy, "policy")

    @property
    def generation(self) -> GenerationInterface:
        """The model that samples."""
        return _present(self._parts.generation, "generation")

    @property
    def environment(self) -> EnvironmentInterface[Any]:
        """What scores what is sampled."""
        return _present(self._parts.environment, "environment")

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return _present(self._parts.tokenizer, "tokenizer")

    @property
    def critic(self) -> PolicyInterface:
        """The second model that is trained."""
        return _present(self._parts.critic, "critic")

    @property
    def teacher(self) -> PolicyInterface:
        """The frozen model."""
        return _present(self._parts.teacher, "teacher")


def _present(part: PartT | None, name: str) -> PartT:
    if part is None:
        raise AlgorithmError(
            f"components.{name} is not there: parts are started by fit, those beside "
            f"policy and tokenizer if _needs of the trainer asks for them"
        )
    return part


def choose_environment(
    config: TrainerConfig,
    reward_fn: RewardFns | None,
    environment: EnvironmentInterface[Any] | None,
) -> Scorer | None:
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


def check_components(
    config: TrainerConfig, given: Components, needs: Needs, environment: Scorer | None
) -> None:
    """Find what can be known to be wrong before anything is started.

    Args:
        config: The run's configuration.
        given: Components to use as they are.
        needs: What the algorithm uses.
        environment: What `choose_environment` chose.

    Raises:
        UserError: A model folder, a backend, an environment or a size; something that
            scores answers where none are sampled.
    """
    if environment is not None and not needs.environment:
        raise ConfigError(
            "this run samples no answers that reward_fn, environment or the section "
            "env could score: leave them out"
        )
    if given.policy is None:
        check_policy(config.policy, config.num_workers)
    elif _is_own(given, needs):
        check_own_policy(config, given.policy, reference=needs.reference_policy)
    elif needs.reference_policy and not getattr(given.policy, "has_reference", True):
        raise ConfigError(
            "this run compares with the initial weights, which the given policy does "
            "not keep: make it with init_reference_model=True, or turn the comparison "
            "off (loss_fn.reference_policy_kl_penalty=0; for DPO "
            "dpo.precompute_reference_logprobs=true)"
        )
    if needs.critic and given.critic is None:
        check_policy(section_of(config, "critic"), config.num_workers)
    if needs.teacher and given.teacher is None:
        check_policy(section_of(config, "teacher"), config.num_workers)
    if needs.generation and given.generation is None:
        if config.policy.generation is None:
            raise ConfigError(
                "policy.generation is null, but the run samples: give it max_new_tokens"
            )
        _check_generation_backend(config)
    if needs.environment and config.env is not None:
        rl_envs.env_registry.get(config.env.name)
    _check_room(given, needs.of_workers(config, given))


def _check_room(given: Components, needs: Needs) -> None:
    """Refuse a given cluster that has no room for the groups to start on it."""
    cluster = given.cluster
    free = getattr(cluster, "num_free_groups", None)
    groups = _groups_to_start(given, needs)
    if cluster is None or free is None or len(groups) <= free:
        return
    wanted = cluster.max_colocated_worker_groups + len(groups) - free
    raise ConfigError(
        f"this run starts {' and '.join(groups)} on the given cluster, which has room "
        f"for {free} more {'group' if free == 1 else 'groups'} of workers: make the "
        f"cluster with max_colocated_worker_groups={wanted}, or give the policy that "
        "is there a cluster of its own"
    )


def _check_generation_backend(config: TrainerConfig) -> None:
    generation = config.policy.generation
    if generation is not None and generation.backend != "auto":
        get_generation_traits(generation.backend)


def with_row_lengths(config: ConfigT, given: Components) -> ConfigT:
    """Fill in the longest row that the models on the hub hold, if none is named.

    Raises:
        ModelLoadError: A model is not there.
    """
    filled: dict[str, rl_models.PolicyConfig] = {}
    for name in ("policy", "critic", "teacher"):
        section = getattr(config, name, None)
        if isinstance(section, rl_models.PolicyConfig) and not _has(given, name):
            filled[name] = with_row_length(section)
    if all(filled[name] is getattr(config, name) for name in filled):
        return config
    if config.policy.max_total_sequence_length is None and "policy" in filled:
        shortest = min(section.row_limit for section in filled.values())
        policy = filled["policy"].replace(max_total_sequence_length=shortest)
        filled["policy"] = policy
    return config.replace(**filled)


def with_tokenizer(given: Components, config: TrainerConfig) -> Components:
    """Load the model's tokenizer, unless one was given."""
    if given.tokenizer is not None:
        return given
    settings = config.policy.tokenizer
    name = settings.name or config.policy.model_name
    return replace(given, tokenizer=load_tokenizer(name, settings.chat_template))


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
    starter = Starter(config, closing if pool is None else pool.closing)
    all_needs, needs = needs, needs.of_workers(config, given)
    given, environment = _one_process(config, given, needs, environment, starter)
    jobs: dict[str, Callable[[], Any]] = {}
    cluster = given.cluster
    further = ("generation", "critic", "teacher")
    groups = ("policy", *(name for name in further if getattr(needs, name)))
    kept: dict[str, Any] = {}
    if pool is not None:
        kept = pool.kept_for(config.cluster, groups)
        cluster = cluster or kept.get("cluster")
    if cluster is None and _starts_anything(given, needs, environment):
        cluster = starter.cluster(len(groups), signals)
    starts: dict[str, Callable[[], Any]] = {
        "policy": lambda: starter.policy(
            _present(cluster, "cluster"),
            needs.reference_policy,
            checkpoint,
            kept.get("policy"),
        )
    }
    if needs.critic:
        starts["critic"] = lambda: starter.further_policy(
            "critic", _present(cluster, "cluster"), checkpoint, kept.get("critic")
        )
    jobs |= _start_or_resume(starts, given, checkpoint)
    if needs.teacher and given.teacher is None:
        # It is never trained, so no checkpoint has it.
        jobs["teacher"] = lambda: starter.further_policy(
            "teacher", _present(cluster, "cluster"), None, kept.get("teacher")
        )
    if needs.generation and given.generation is None:
        jobs["generation"] = lambda: starter.generation(
            _present(cluster, "cluster"), kept.get("generation")
        )
    if needs.environment:
        left = _left_environment(config, environment, pool)
        if left is not None:
            given = replace(given, environment=left)
        else:
            jobs["environment"] = lambda: starter.environment(environment)
    abandon: list[Callable[[], object]] = [kept.clear]
    if cluster is not None and cluster is not given.cluster:
        abandon.append(cluster.shutdown)
    started = run_all(jobs, signals, abandon)
    parts = replace(given, cluster=cluster, **started)
    # An environment object is its maker's, and no later trainer's.
    kept |= {n: part for n, part in started.items() if part is not environment}
    kept["cluster"] = cluster
    if all_needs.shares(config, given):
        # It has what a generator is called for, and nothing has to be sent to it.
        sampler = cast("GenerationInterface", parts.required.policy)
        return replace(parts, generation=sampler)
    return _with_sync(parts, starter) if needs.generation else parts


def _with_sync(parts: Components, starter: Starter) -> Components:
    policy, generation = parts.required.policy, parts.required.generation
    both: tuple[object, object] = (policy, generation)
    if both[0] is both[1]:
        return parts
    # A policy that cannot send its weights samples itself (`samples_itself`).
    source = cast("WeightSource", policy)
    sync = rl_models.WeightSynchronizer(source, generation)
    starter.close_later("weight sync", sync.close)
    return replace(parts, sync=sync)


def _is_own(given: Components, needs: Needs) -> bool:
    """Whether the policy that was given is to sample as well."""
    is_asked = needs.generation and given.generation is None
    return is_asked and given.policy is not None and samples_itself(given.policy)


def _one_process(
    config: TrainerConfig,
    given: Components,
    needs: Needs,
    environment: Scorer | None,
    starter: Starter,
) -> tuple[Components, Scorer | None]:
    """Make a policy that samples itself the generator, and score in this process."""
    if not _is_own(given, needs):
        return given, environment
    assert config.policy.generation is not None
    own = OwnPolicy(given.required.policy, config.policy.generation.sampling_params())
    if environment is not None and environment is not config.env:
        environment = starter.environment_here(environment)
    # It stands for both: what it does not do itself it passes on to the policy.
    return replace(
        given,
        policy=cast("PolicyInterface", own),
        generation=cast("GenerationInterface", own),
    ), environment


def _start_or_resume(
    starts: dict[str, Callable[[], Any]], given: Components, checkpoint: Path | None
) -> dict[str, Callable[[], Any]]:
    """Return what starts the models that were not given; the others are resumed."""
    for name in starts:
        if _has(given, name) and checkpoint is not None:
            getattr(given, name).load_checkpoint(*resume_paths(checkpoint, name))
    return {name: start for name, start in starts.items() if not _has(given, name)}


def _left_environment(
    config: TrainerConfig, chosen: Scorer | None, pool: KeptWorkers | None
) -> EnvironmentInterface[Any] | None:
    """Return the environment of the last trainer, if it is that of the section."""
    section = config.env if chosen is config.env else None
    if pool is None or not pool.keeps_environment(section):
        return None
    environment: EnvironmentInterface[Any] = pool.parts["environment"]
    return environment


def _starts_anything(
    given: Components, needs: Needs, environment: Scorer | None
) -> bool:
    """Whether a process must be started."""
    local_env = environment is None or is_environment(environment)
    return bool(_groups_to_start(given, needs)) or not local_env


def _groups_to_start(given: Components, needs: Needs) -> list[str]:
    """Return the parts with workers that the run needs and was not given."""
    parts = {
        "policy": True,
        "generation": needs.generation and not _is_own(given, needs),
        "critic": needs.critic,
        "teacher": needs.teacher,
    }
    return [n for n, is_needed in parts.items() if is_needed and not _has(given, n)]


def _has(given: Components, name: str) -> bool:
    return getattr(given, name) is not None
