"""Checks of rewards and the columns beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl_algorithms.errors import LossInputError

__all__ = ["check_reward_columns", "check_rewards"]

_MATRICES = ("token_mask", "kl_penalty")


def check_rewards(rewards: Any, /, **others: Any) -> None:
    """Check that rewards, and the columns that belong to them, are [N] numbers.

    Args:
        rewards: [N].
        others: [N] each, by name; None is skipped.

    Raises:
        LossInputError: One is not a tensor or holds no values, or shapes or devices
            differ.
    """
    _check_values("rewards", rewards)
    if rewards.dim() != 1:
        raise LossInputError(
            f"rewards must be [N], one number per row: got {list(rewards.shape)}"
        )
    for name, value in others.items():
        if value is None:
            continue
        _check_values(name, value)
        if value.shape != rewards.shape:
            raise LossInputError(
                f"{name} must have the shape of rewards, {list(rewards.shape)}: got "
                f"{list(value.shape)}"
            )
        _check_device(name, value, rewards)


def check_reward_columns(rewards: Tensor, columns: Mapping[str, Any]) -> None:
    """Check `RewardColumns` against rewards that `check_rewards` has passed.

    Raises:
        LossInputError: A column does not have the same rows or tokens.
    """
    check_rewards(
        rewards,
        std_rewards=columns.get("std_rewards"),
        **(columns.get("named_rewards") or {}),
    )
    shapes = {}
    for name in _MATRICES:
        value = columns.get(name)
        if value is None:
            continue
        _check_values(name, value)
        if value.dim() != 2 or len(value) != len(rewards):
            raise LossInputError(
                f"{name} must be [N, S] with N={len(rewards)} rewards: got "
                f"{list(value.shape)}"
            )
        _check_device(name, value, rewards)
        shapes[name] = list(value.shape)
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        found = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise LossInputError(f"columns [N, S] must have one width: got {found}")


def _check_values(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise LossInputError(
            f"{name} must be a tensor: got {type(value).__name__}; use torch.tensor"
        )
    if value.is_meta:
        raise LossInputError(
            f"{name} must hold values: it is on the meta device, which has only "
            "shapes; make it on a real device, such as cpu"
        )


def _check_device(name: str, value: Tensor, rewards: Tensor) -> None:
    if value.device != rewards.device:
        raise LossInputError(
            f"{name} must be on the device of rewards, {rewards.device}: got "
            f"{value.device}"
        )
