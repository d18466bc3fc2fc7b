"""Choice and checks of a run's components, before anything is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import rl_envs
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.setup.components import Components, Needs
from rl_algorithms.trainers.setup.own_policy import check_own_policy, samples_itself
from rl_algorithms.trainers.setup.starting import Scorer, section_of
from rl_distributed.errors import ConfigError
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.rewards.lists import RewardFns
from rl_models.config import PolicyConfig
from rl_models.generation.traits import get_generation_traits
from rl_models.model_traits import PolicyTraits
from rl_models.policy.preflight import check_policy
from rl_models.policy.row_length import with_row_length
from rl_models.tokens.tokenizer import load_tokenizer

__all__ = [
    "check_components",
    "choose_environment",
    "with_row_lengths",
    "with_tokenizer",
]

ConfigT = TypeVar("ConfigT", bound=TrainerConfig)


def choose_environment(
    config: TrainerConfig,
    reward_fn: RewardFns | None,
    environment: EnvironmentInterface[Any] | None,
) -> Scorer | None:
    """Return what scores answers: a function, an object, or the section `env`.

    Raises:
        ConfigError: More than one is given.
    """
    given = {
        "reward_fn": reward_fn,
        "environment": environment,
        "config section env": config.env,
    }
    named = [name for name, value in given.items() if value is not None]
    # An object may stand in for the section of its configuration.
    if len(named) > 1 and named != ["environment", "config section env"]:
        raise ConfigError(f"{' and '.join(named)} exclude each other: give one of them")
    return next((value for value in given.values() if value is not None), None)


def check_components(
    config: TrainerConfig, given: Components, needs: Needs, environment: Scorer | None
) -> None:
    """Find mistakes in the components before anything is started.

    Args:
        config: The run's configuration.
        given: Components to use as they are.
        needs: Components that the algorithm uses.
        environment: Choice of `choose_environment`.

    Raises:
        UserError: A model folder, a backend, an environment or a size is wrong; or
            something scores answers, but none are sampled.
    """
    if environment is not None and not needs.environment:
        raise ConfigError(
            "this run samples no answers that reward_fn, environment or the section "
            "env could score: leave them out"
        )
    if given.policy is None:
        check_policy(config.policy, config.num_workers)
    elif needs.samples_with(given):
        check_own_policy(config, given.policy, reference=needs.reference_policy)
    elif needs.reference_policy and not PolicyTraits.of(given.policy).has_reference:
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
    _check_room(config, given, needs.of_workers(config, given).on_cluster(config))


def _check_room(config: TrainerConfig, given: Components, needs: Needs) -> None:
    """Reject clusters without room, or without a use."""
    own = given.policy is not None and samples_itself(given.policy)
    if config.sampling_cluster is not None and (own or given.generation is not None):
        raise ConfigError(
            "generation_cluster is for a generator that the run starts, and one was "
            "given (or a policy that samples by itself): make that one with the "
            "cluster that it is to have, and leave generation_cluster out"
        )
    cluster = given.cluster
    free = getattr(cluster, "num_free_groups", None)
    groups = needs.groups_to_start(given)
    if cluster is None or free is None or len(groups) <= free:
        return
    wanted = cluster.max_colocated_worker_groups + len(groups) - free
    raise ConfigError(
        f"this run starts {' and '.join(groups)} on the given cluster, which has room "
        f"for {free} more {'group' if free == 1 else 'groups'} of workers: create the "
        f"cluster with max_colocated_worker_groups={wanted}, or give the existing "
        "policy a cluster of its own"
    )


def _check_generation_backend(config: TrainerConfig) -> None:
    generation = config.policy.generation
    if generation is not None and generation.backend != "auto":
        get_generation_traits(generation.backend)


def with_row_lengths(config: ConfigT, given: Components) -> ConfigT:
    """Fill in the longest row that fits all models, if none is configured.

    Raises:
        ModelLoadError: A model does not exist.
    """
    filled: dict[str, PolicyConfig] = {}
    for name in ("policy", "critic", "teacher"):
        section = getattr(config, name, None)
        # A given model has its row length already.
        if isinstance(section, PolicyConfig) and not given.has(name):
            filled[name] = with_row_length(section)
    if all(filled[name] is getattr(config, name) for name in filled):
        return config
    if config.policy.max_total_sequence_length is None and "policy" in filled:
        # Each row passes through all models.
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
