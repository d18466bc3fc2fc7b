"""Configuration of a run from a policy that already exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.keywords import build_config
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig
from rl_models.interfaces import PolicyInterface
from rl_models.model_traits import PolicyTraits
from rl_models.policy.row_length import with_row_length

__all__ = ["checked_config", "told_apart", "with_ranks"]

ConfigT = TypeVar("ConfigT", bound=TrainerConfig)

# Fields of the section that only the trainer reads, not the policy's workers.
_OF_TRAINER = ("generation", "tokenizer", "train_global_batch_size")
_LENGTH = "max_total_sequence_length"


def told_apart(
    trainer: str,
    config: Config | Mapping[str, Any] | PolicyInterface | None,
    policy: PolicyInterface | None,
) -> tuple[Config | Mapping[str, Any] | None, PolicyInterface | None]:
    """Tell configuration and policy apart, either of which may be the first argument.

    Args:
        trainer: Name of the trainer in messages.
        config: A configuration, a policy, or None.
        policy: A policy or None.

    Raises:
        ConfigError: Both are missing, or the first argument is neither.
    """
    if config is not None and not isinstance(config, Mapping | Config):
        if policy is not None:
            raise ConfigError(
                f"{trainer} got a {type(config).__name__} first, and a policy by name: "
                "what comes first is a configuration or the policy; give one policy"
            )
        config, policy = None, config
    if policy is not None:
        _check_policy_object(trainer, policy, stands_alone=config is None)
    elif config is None:
        raise ConfigError(
            f"{trainer} needs a policy or a configuration: got neither; give "
            f"{trainer}(policy, cluster), or use {trainer}.from_pretrained(model)"
        )
    return config, policy


def _check_policy_object(trainer: str, policy: object, *, stands_alone: bool) -> None:
    # A torch module, passed alone by mistake, has a method `train` as well.
    methods = ("train", "shutdown") if stands_alone else ("train",)
    has_all = all(callable(getattr(policy, name, None)) for name in methods)
    if has_all and not isinstance(policy, type):
        return
    got = type(policy).__name__
    if isinstance(policy, type):
        got = f"the class {policy.__name__}"
    raise ConfigError(
        f"{trainer} takes a policy (a PolicyInterface such as HuggingFacePolicy) or a "
        f"configuration: got {got}; for the name of a model use "
        f"{trainer}.from_pretrained(name)"
    )


def checked_config(
    trainer: str,
    cls: type[ConfigT],
    config: Config | Mapping[str, Any] | None,
    policy: PolicyInterface | None,
    settings: Mapping[str, Any],
) -> ConfigT:
    """Return the configuration of a trainer.

    Args:
        trainer: Name of the trainer in messages.
        cls: Class of the configuration.
        config: A configuration, a mapping, or None.
        policy: Policy whose config becomes the section `policy`, if `config` has none.
        settings: Values by name or dotted path, see `build_config`.

    Raises:
        ConfigError: A key or value is wrong, or `config` is of another class.
    """
    source = f"config of {trainer}"
    if isinstance(config, Config):
        if not isinstance(config, cls):
            raise ConfigError(
                f"{trainer} takes a {cls.__name__}: got {type(config).__name__}"
            )
        # Complete in itself, as every such class has a section `policy`.
        if not settings:
            return config
        return build_config(cls, settings, base=config, source=source)
    if policy is not None and (config is None or "policy" not in config):
        return _config_for(trainer, cls, policy, config, settings)
    if settings:
        return build_config(cls, settings, base=config, source=source)
    return cls.from_dict(config or {}, source=source)


def _config_for(
    trainer: str,
    cls: type[ConfigT],
    policy: PolicyInterface,
    base: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> ConfigT:
    """Return the configuration of a run that trains this policy."""
    own = getattr(policy, "config", None)
    if not isinstance(own, PolicyConfig):
        if "model_name" not in settings:
            raise ConfigError(
                f"{trainer}: the given {type(policy).__name__} has no attribute "
                "`config` (a PolicyConfig) that names model and tokenizer: give "
                "model_name=..., or config={'policy': {'model_name': ...}}"
            )
        return build_config(cls, settings, base=base)
    tree = {**(base or {}), "policy": _section_of(own)}
    source = f"the settings of {trainer} and the config of its policy"
    config = build_config(cls, settings, base=tree, source=source)
    _check_unchanged(trainer, own, config.policy)
    if config.policy.max_total_sequence_length is None:
        longest = own.max_total_sequence_length
        section = config.policy.replace(max_total_sequence_length=longest)
        config = config.replace(policy=section)
    return config


def _section_of(own: PolicyConfig) -> dict[str, Any]:
    """Return the section, without a row length that is the model's default.

    Answers then get the same default length as in a run without a given policy.
    """
    section = own.to_dict()
    unset = {name: value for name, value in section.items() if name != _LENGTH}
    default = with_row_length(PolicyConfig.from_dict(unset))
    is_default = own.row_limit == default.row_limit
    return unset if is_default else section


def _check_unchanged(trainer: str, own: PolicyConfig, asked: PolicyConfig) -> None:
    """Reject settings that an existing policy cannot adopt."""
    before, after = own.to_dict(), asked.to_dict()
    changed = [n for n in after if n not in _OF_TRAINER and before[n] != after[n]]
    longest = asked.max_total_sequence_length
    # Shorter rows fit an existing policy without a change.
    if _LENGTH in changed and (longest is None or longest <= own.row_limit):
        changed.remove(_LENGTH)
    if own.logprob_temperature != asked.logprob_temperature:
        changed.append("generation.temperature")
    if changed:
        names = ", ".join(f"policy.{name}" for name in changed)
        raise ConfigError(
            f"{trainer}: {names} cannot be set for a policy that already exists: set "
            f"it when the policy is created, or leave it out"
        )


def with_ranks(
    config: ConfigT, policy: PolicyInterface | None, cluster: RayVirtualCluster | None
) -> ConfigT:
    """Set the number of workers from a given policy or cluster, unless configured."""
    if "cluster" in config.model_fields_set:
        return config
    ranks = PolicyTraits.of(policy).num_ranks
    if ranks is None and policy is None and cluster is not None:
        ranks = cluster.world_size()
    if not isinstance(ranks, int) or ranks == config.num_workers:
        return config
    return config.replace(cluster={"workers_per_node": ranks})
