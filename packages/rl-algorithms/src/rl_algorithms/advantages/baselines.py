"""Baseline and standard deviation of each group's rewards, without a loop over groups.

Everything is computed in float64 from rewards centered on their group, so that a large
common offset costs no accuracy.

Groups of few valid rows, with `leave_one_out_baseline`:

| valid rows | baseline | standard deviation |
|---|---|---|
| 1 | the reward itself (advantage 0) | 0 |
| 2 | the other reward | of both rows, as a single other row has none |
| 3 or more | mean of the others | of the others, or of all rows if the others agree |

A standard deviation of 0 means that all rewards of the group agree to six digits, so
there is nothing to divide by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algorithms.advantages.checks import check_rewards
from rl_algorithms.errors import LossInputError

__all__ = [
    "calculate_baseline_and_std_per_group",
    "calculate_baseline_and_std_per_prompt",
]

_RESOLUTION = 1e-6
"""Relative standard deviation below which differences are rounding of float32."""


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool = True,
    std_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Group rows with equal prompts, then compute as in the function per group.

    Two rows of the data set with the same prompt fall into one group here. To avoid
    that, call `calculate_baseline_and_std_per_group` with group indices.

    Args:
        prompts: [N, S] prompt tokens.
        rewards: [N].
        valid_mask: [N], 1 where the row counts.
        leave_one_out_baseline: Whether to leave a row out of its own baseline.
        std_rewards: [N] rewards for the standard deviation; by default `rewards`.

    Returns:
        Baseline and standard deviation, [N] each.

    Raises:
        LossInputError: The columns do not have the same rows.
    """
    check_rewards(rewards)
    if prompts.dim() != 2 or prompts.shape[0] != rewards.shape[0]:
        raise LossInputError(
            f"prompts must be [N, S] with N={rewards.shape[0]} rewards: got "
            f"{list(prompts.shape)}"
        )
    if prompts.is_meta:
        raise LossInputError("prompts must hold values: they are on the meta device")
    _, group_index = torch.unique(prompts, dim=0, return_inverse=True)
    return calculate_baseline_and_std_per_group(
        group_index, rewards, valid_mask, leave_one_out_baseline, std_rewards
    )


def calculate_baseline_and_std_per_group(
    group_index: Tensor,
    rewards: Tensor,
    valid_mask: Tensor | None = None,
    leave_one_out_baseline: bool = True,
    std_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the rewards of each row's group.

    Invalid rows enter no mean. The standard deviation is the unbiased one (n - 1).

    Args:
        group_index: [N] group of each row; any integers.
        rewards: [N].
        valid_mask: [N], 1 where the row counts; by default all do.
        leave_one_out_baseline: Whether to leave a row out of its own statistics.
        std_rewards: [N] rewards for the standard deviation; by default `rewards`.

    Returns:
        Baseline and standard deviation, [N] each, in the dtype of `rewards`.

    Raises:
        LossInputError: The columns do not have the same rows, or hold no values.
    """
    check_rewards(
        rewards,
        group_index=group_index,
        valid_mask=valid_mask,
        std_rewards=std_rewards,
    )
    # Group indices may be sparse or negative; sums per group need them to be 0 to G -
    # 1.
    _, groups = torch.unique(group_index, return_inverse=True)
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    valid = (
        torch.ones_like(rewards, dtype=torch.float64)
        if valid_mask is None
        else (valid_mask != 0).to(torch.float64)
    )
    moments = _GroupMoments(groups, num_groups, valid)
    baseline = moments.mean(rewards, leave_one_out_baseline)
    std = moments.std(
        rewards if std_rewards is None else std_rewards, leave_one_out_baseline
    )
    # An integer dtype would truncate the mean.
    dtype = rewards.dtype if rewards.dtype.is_floating_point else torch.float32
    return baseline.to(dtype), std.to(dtype)


class _GroupMoments:
    """Moments over the valid rows of each group, broadcast back to rows [N]."""

    def __init__(self, groups: Tensor, num_groups: int, valid: Tensor) -> None:
        self._groups, self._num_groups, self._valid = groups, num_groups, valid
        self._count = self._sum(valid)

    def _sum(self, values: Tensor) -> Tensor:
        totals = torch.zeros(
            self._num_groups, dtype=torch.float64, device=values.device
        )
        return totals.index_add_(0, self._groups, values)[self._groups]

    def _centre(self, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's group mean, and its deviation from it (0 if invalid)."""
        # `where` and not a product: invalid rewards may be NaN, and NaN * 0 is NaN.
        values = torch.where(self._valid != 0, rewards.to(torch.float64), 0.0)
        mean = self._sum(values) / self._count.clamp(min=1)
        return mean, torch.where(self._valid != 0, values - mean, 0.0)

    def mean(self, rewards: Tensor, leave_one_out: bool) -> Tensor:
        mean, deviation = self._centre(rewards)
        if leave_one_out:
            others = self._count - self._valid
            # Deviations of a group sum to 0, so those of the others sum to minus this
            # row's.
            mean = mean - deviation / others.clamp(min=1)
        # A group without valid rows has no mean; the reward itself gives the advantage
        # 0.
        return torch.where(self._count == 0, rewards.to(torch.float64), mean)

    def std(self, rewards: Tensor, leave_one_out: bool) -> Tensor:
        _, deviation = self._centre(rewards)
        squares = self._sum(deviation.square())
        # Relative to the rewards, not to their deviations: equal float32 rewards differ
        # by rounding in proportion to their size.
        floor = _RESOLUTION * self._largest(rewards)
        whole = (squares / (self._count - 1).clamp(min=1)).sqrt()
        whole = torch.where(whole > floor, whole, 0.0)
        if not leave_one_out:
            return whole
        others = self._count - self._valid
        # Sum of squares of the others around their own mean, by removing one value from
        # it (Welford, backwards); the clamp takes care of rounding below 0.
        rest = squares - deviation.square() * (1 + 1 / others.clamp(min=1))
        std = (rest.clamp(min=0) / (others - 1).clamp(min=1)).sqrt()
        spread = (others > 1) & (std > floor)
        # Where the whole group agrees, a spread of the others is rounding as well.
        return torch.where(spread & (whole > 0), std, whole)

    def _largest(self, rewards: Tensor) -> Tensor:
        """Return the largest absolute reward among the valid rows of each group."""
        values = torch.where(self._valid != 0, rewards.to(torch.float64).abs(), 0.0)
        largest = torch.zeros(
            self._num_groups, dtype=torch.float64, device=values.device
        )
        return largest.scatter_reduce_(0, self._groups, values, "amax")[self._groups]
