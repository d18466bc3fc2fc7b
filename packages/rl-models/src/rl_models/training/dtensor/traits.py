"""Traits of the backend `dtensor` for the driver, without torch if settings are plain.

Importing torch takes seconds. Settings that are not plain are no mistake: the backend's
own check decides about them, with torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rl_distributed.errors import ConfigError
from rl_models.config import OptimizerConfig, PolicyConfig
from rl_models.training.traits import TrainingTraits

__all__ = [
    "Traits",
    "check_expert_layout",
    "check_pipeline_layout",
    "settings_are_plain",
]


class Traits(TrainingTraits):
    """Abilities of `DTensorTrainingBackend`."""

    parallel_axes = ("pipeline", "context", "tensor", "expert")
    has_adapters = True

    @staticmethod
    def check_config(config: PolicyConfig) -> None:
        """Check optimizer, schedule and axes that exclude each other.

        Raises:
            ConfigError: A class or an argument of it does not exist or does not fit, or
                the axes exclude each other.
        """
        check_expert_layout(config)
        check_pipeline_layout(config)
        if not settings_are_plain(config):
            # By name: the module imports torch, and this one is read to avoid that.
            home = importlib.import_module("rl_models.training.dtensor.backend")
            home.DTensorTrainingBackend.check_config(config)


def check_expert_layout(config: PolicyConfig) -> None:
    """Refuse settings that exclude shared experts.

    Raises:
        ConfigError: A setting, with a remedy.
    """
    weight = config.dtensor.router_loss_weight
    if weight and config.parallelism.context > 1:
        raise ConfigError(
            "policy.dtensor.router_loss_weight must be 0 with "
            "policy.parallelism.context > 1, where no worker has all tokens of a "
            f"micro-batch: got {weight:g}"
        )
    size = config.parallelism.expert
    if size == 1:
        return
    if config.lora is not None:
        raise ConfigError(
            "policy.lora must be null with policy.parallelism.expert > 1: got expert "
            f"{size}; share the model by data (FSDP) instead"
        )


def check_pipeline_layout(config: PolicyConfig) -> None:
    """Refuse settings that exclude pipeline stages.

    Raises:
        ConfigError: A setting, with a remedy.
    """
    layout = config.parallelism
    if layout.pipeline == 1:
        return
    with_stages = f"with policy.parallelism.pipeline {layout.pipeline} in the training "
    with_stages += "backend 'dtensor'"
    for name in ("context", "expert"):
        size = getattr(layout, name)
        if size > 1:
            raise ConfigError(
                f"policy.parallelism.{name} must be 1 {with_stages}: got {size}; set "
                "one of the two to 1, or share layers too (policy.parallelism.tensor)"
            )
    router_loss = config.dtensor.router_loss_weight
    refused = {
        "policy.dtensor.router_loss_weight must be 0": router_loss,
        "policy.dtensor.compile must be null": config.dtensor.compile,
    }
    for rule, value in refused.items():
        if value:
            got = "a setting" if value is True else repr(value)
            raise ConfigError(
                f"{rule} {with_stages}: got {got}; change it or set "
                "policy.parallelism.pipeline to 1"
            )


def _is_size(value: Any) -> bool:
    # Not `isinstance`: a bool is an int.
    return type(value) in (int, float) and value >= 0


def _are_decays(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(_is_size(decay) and decay < 1 for decay in value)
    )


_ADAM: Mapping[str, Callable[[Any], bool]] = {
    "lr": _is_size,
    "betas": _are_decays,
    "eps": _is_size,
    "weight_decay": _is_size,
}
# The usual settings only: a wrong guess here would start workers for nothing.
_PLAIN = {"torch.optim.Adam": _ADAM, "torch.optim.AdamW": _ADAM}
_SHAPES = ("constant", "linear", "cosine")


def settings_are_plain(config: PolicyConfig) -> bool:
    """Return whether settings are known to be valid without asking torch."""
    if config.dtensor.compile is not None:
        return False
    schedule = config.scheduler
    if schedule is not None and not (
        schedule.name in _SHAPES and _is_size(schedule.kwargs.get("min_lr_ratio", 0.0))
    ):
        return False
    return _is_plain(config.optimizer)


def _is_plain(optimizer: OptimizerConfig) -> bool:
    known = _PLAIN.get(optimizer.name, {})
    return bool(known) and all(
        name in known and known[name](value) for name, value in optimizer.kwargs.items()
    )
