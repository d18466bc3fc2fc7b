"""Settings of rewards and advantages. Imports neither torch nor a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rl_distributed.config import Config

__all__ = [
    "AdvantageConfig",
    "RewardScalingConfig",
    "RewardShapingConfig",
    "with_buffer_lengths",
]


class AdvantageConfig(Config):
    """Computation of advantages from rewards."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "raw_reward"] = "grpo"
    """Estimator. `grpo`: relative to the group; `gdpo`: the same for each of several
    rewards, then combined; `reinforce_plus_plus`: relative to the batch; `raw_reward`:
    the reward itself."""
    use_leave_one_out_baseline: bool = True
    """Whether the baseline of an answer is the mean of the *others* of its group."""
    normalize_rewards: bool = True
    """Whether to divide by the standard deviation; false in Dr. GRPO."""
    normalize_over: Literal["group", "batch"] = "group"
    """Rows for the standard deviation: the prompt's group, or all valid rows of the
    batch. Only for `grpo`: `gdpo` uses both, `reinforce_plus_plus` the batch."""
    minus_baseline: bool = False
    """Whether `reinforce_plus_plus` subtracts the mean of the prompt's group first."""
    reward_weights: dict[str, float] | None = None
    """Weight of each reward in `gdpo`, by name; 1 by default."""
    advantage_clip_low: float | None = None
    """Lower bound of advantages; null for none."""
    advantage_clip_high: float | None = None
    """Upper bound of advantages; null for none."""

    @model_validator(mode="after")
    def _check_clip(self) -> Self:
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low >= high:
            raise ValueError(
                "advantage_clip_low must be less than advantage_clip_high: got "
                f"{low} and {high}"
            )
        return self

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        """Reject settings that the estimator does not read."""
        for field, wanted, given in (
            ("reward_weights", "gdpo", self.reward_weights is not None),
            ("minus_baseline", "reinforce_plus_plus", self.minus_baseline),
            ("normalize_over=batch", "grpo", self.normalize_over == "batch"),
        ):
            if given and self.name != wanted:
                raise ValueError(
                    f"{field} belongs to adv_estimator.name={wanted}: got "
                    f"{self.name}; leave one of the two out"
                )
        return self

    @property
    def compares_group(self) -> bool:
        """Whether groups of a single answer would have no learning signal."""
        return self.name in ("grpo", "gdpo") or self.minus_baseline


class RewardScalingConfig(Config):
    """Linear mapping of rewards from one range to another, clamped to the first."""

    source_min: float = 0.0
    """Reward mapped to `target_min`."""
    source_max: float = 1.0
    """Reward mapped to `target_max`."""
    target_min: float = 0.0
    """Smallest scaled reward."""
    target_max: float = 1.0
    """Largest scaled reward."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.source_min >= self.source_max:
            raise ValueError(
                "source_min must be less than source_max: got "
                f"{self.source_min} and {self.source_max}"
            )
        return self


class RewardShapingConfig(Config):
    """Penalties for answers that are too long (DAPO, section 3.4)."""

    max_response_length: int | None = Field(default=None, ge=1)
    """Length in tokens at which the penalty is full; null for no length penalty."""
    overlong_buffer_length: int = Field(default=0, ge=0)
    """Number of tokens before that over which the penalty grows linearly."""
    overlong_buffer_penalty: float = Field(default=1.0, ge=0.0)
    """Size of the full penalty."""
    overlong_buffer_fraction: float | None = Field(default=None, gt=0.0, le=1.0)
    """Default for both lengths: the penalty is full at
    `policy.generation.max_new_tokens`, and grows over this fraction of it."""
    stop_properly_penalty_coef: float | None = Field(default=None, ge=0.0, le=1.0)
    """Factor of the rewards of truncated answers; null for none."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        limit = self.max_response_length
        if self.stop_properly_penalty_coef is not None and limit is not None:
            raise ValueError(
                "stop_properly_penalty_coef and max_response_length exclude each "
                "other: set only one of them"
            )
        if limit is not None and not 0 < self.overlong_buffer_length <= limit:
            raise ValueError(
                "overlong_buffer_length must be between 1 and max_response_length: "
                f"got {self.overlong_buffer_length} and {limit}"
            )
        return self


def with_buffer_lengths(shaping: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Fill in the lengths that `overlong_buffer_fraction` stands for.

    Args:
        shaping: A section `reward_shaping`, not validated yet.
        limit: Maximum number of tokens of an answer.
    """
    given = {name: value for name, value in shaping.items() if value is not None}
    fraction = given.get("overlong_buffer_fraction")
    if not isinstance(fraction, int | float):
        return dict(shaping)
    limit = given.get("max_response_length", limit)
    buffer = max(1, round(fraction * limit)) if isinstance(limit, int) else limit
    return {
        "max_response_length": limit,
        "overlong_buffer_length": buffer,
        **given,
    }
