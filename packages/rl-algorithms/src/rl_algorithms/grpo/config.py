"""Configuration of GRPO."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rl_algorithms.advantages.config import (
    AdvantageConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.trainers.rollout_config import (
    RolloutTrainerConfig,
    SamplingSettings,
)

__all__ = ["GRPOConfig", "GRPOSettings"]


class GRPOSettings(SamplingSettings):
    """Section `grpo`."""

    adv_estimator: AdvantageConfig = Field(default_factory=AdvantageConfig)
    """How rewards become advantages."""
    reward_scaling: RewardScalingConfig | None = None
    """Map rewards to another range first; null: leave them."""
    reward_shaping: RewardShapingConfig | None = None
    """Penalties for long answers; null: none."""
    overlong_filtering: bool = False
    """Leave answers out of the loss that the length limit cut off."""
    drop_zero_variance_groups: bool = False
    """Leave groups out whose answers all earn the same, without sampling others."""
    use_dynamic_sampling: bool = False
    """Sample further prompts until the step has all its groups with variance."""
    dynamic_sampling_max_gen_batches: int = Field(10, gt=0)
    """At most so many batches are sampled for one step."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Never ask for a reference policy; needs a KL penalty of 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.use_dynamic_sampling and self.drop_zero_variance_groups:
            raise ValueError(
                "use_dynamic_sampling and drop_zero_variance_groups exclude each "
                "other: the first replaces groups, the second leaves them out"
            )
        relative = self.adv_estimator.name == "grpo"
        if relative and self.num_generations_per_prompt < 2:
            raise ValueError(
                "num_generations_per_prompt must be at least 2 for advantages within a "
                f"group: got {self.num_generations_per_prompt}; raise it, or set "
                "adv_estimator.name to raw_reward"
            )
        return self


class GRPOConfig(RolloutTrainerConfig):
    """Everything a GRPO run needs."""

    output_dir: str = "runs/grpo"
    """Folder of the run; see `TrainerConfig`."""
    grpo: GRPOSettings = Field(default_factory=GRPOSettings)
    """The algorithm."""
    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig)
    """The loss."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (
            self.grpo.skip_reference_policy_logprobs_calculation
            and self.loss_fn.needs_reference_logprobs
        ):
            raise ValueError(
                "grpo.skip_reference_policy_logprobs_calculation needs "
                "loss_fn.reference_policy_kl_penalty=0: got "
                f"{self.loss_fn.reference_policy_kl_penalty}"
            )
        return self
