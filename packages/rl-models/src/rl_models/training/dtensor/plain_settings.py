"""Settings that are known to fit without asking torch, which takes seconds to import.

What is not plain is no mistake: the backend's `check_config` decides, with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_models.config import OptimizerConfig, PolicyConfig

__all__ = ["has_adapters", "parallel_axes", "settings_are_plain"]

has_adapters = True
"""Whether the backend trains `policy.lora`."""
parallel_axes = ("tensor",)
"""Axes of `policy.parallelism`, besides `data`, that the backend has."""


def _is_size(value: Any) -> bool:
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
_PLAIN = {"torch.optim.Adam": _ADAM, "torch.optim.AdamW": _ADAM}
_SHAPES = ("constant", "linear", "cosine")


def settings_are_plain(config: PolicyConfig) -> bool:
    """Whether optimizer and schedule are known to fit without importing torch."""
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
