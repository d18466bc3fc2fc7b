"""Configuration of GRPO."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rl_algorithms.advantages.config import AdvantageConfig
from rl_algorithms.trainers.settings.policy_gradient_config import (
    PolicyGradientConfig,
    PolicyGradientSettings,
)
from rl_algorithms.trainers.settings.unused_keys import Idle

__all__ = ["GRPOConfig", "GRPOSettings"]


class GRPOSettings(PolicyGradientSettings):
    """Section `grpo`."""

    adv_estimator: AdvantageConfig = Field(default_factory=AdvantageConfig)
    """Computation of advantages from rewards."""
    seq_logprob_error_threshold: float | None = Field(None, ge=1.0)
    """Largest mean of `exp|difference of log-probs|` between sampler and trainer over
    an answer's tokens; answers above it are excluded from the loss. null for no limit.
    """
    drop_zero_variance_groups: bool = False
    """Whether to exclude groups whose answers all earn the same reward, without
    sampling others in their place."""
    use_dynamic_sampling: bool = False
    """Whether to sample further prompts until the step is full of groups with differing
    rewards (DAPO)."""
    dynamic_sampling_max_gen_batches: int = Field(10, gt=0)
    """Maximum number of batches sampled for one step."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Whether to insist that no reference policy is used; requires a KL penalty of 0.
    """

    @property
    def compares_group(self) -> bool:
        """Whether an answer is judged only relative to others to its prompt."""
        return self.adv_estimator.compares_group

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.use_dynamic_sampling and self.drop_zero_variance_groups:
            raise ValueError(
                "use_dynamic_sampling and drop_zero_variance_groups exclude each "
                "other: the first replaces groups, the second leaves them out"
            )
        if self.use_dynamic_sampling and self.asynchronous is not None:
            raise ValueError(
                "use_dynamic_sampling and asynchronous exclude each other: the first "
                "selects the prompts of a step after sampling, the second before; set "
                "drop_zero_variance_groups=true instead, or asynchronous to null"
            )
        return self

    @model_validator(mode="after")
    def _check_estimator(self) -> Self:
        estimator = self.adv_estimator
        compares = (
            estimator.compares_group
            or self.use_dynamic_sampling
            or self.drop_zero_variance_groups
        )
        if compares and self.num_generations_per_prompt < 2:
            raise ValueError(
                "num_generations_per_prompt must be at least 2 for advantages within a "
                f"group: got {self.num_generations_per_prompt}; raise it, or set "
                "adv_estimator.name to raw_reward or reinforce_plus_plus, without "
                "minus_baseline, dynamic sampling and drop_zero_variance_groups"
            )
        if estimator.name == "gdpo" and (self.reward_scaling or self.reward_shaping):
            raise ValueError(
                "reward_scaling and reward_shaping change the sum of the rewards, "
                "which adv_estimator.name=gdpo does not read: leave them out (null), "
                "and let the reward function return the penalty as one of its rewards"
            )
        return self


class GRPOConfig(PolicyGradientConfig):
    """Configuration of a GRPO run."""

    grpo: GRPOSettings = Field(default_factory=GRPOSettings)
    """Settings of the algorithm."""

    def idle(self) -> tuple[Idle, ...]:
        """Return the disabled features, including those of every algorithm."""
        if self.grpo.use_dynamic_sampling:
            return super().idle()
        keys = ("grpo.dynamic_sampling_max_gen_batches",)
        return (*super().idle(), Idle("grpo.use_dynamic_sampling=false", keys))

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
        if self.loss_fn.positive_nll_coef > 0:
            raise ValueError(
                "loss_fn.positive_nll_coef belongs to ppo: got "
                f"{self.loss_fn.positive_nll_coef}; leave it out (0)"
            )
        if self.loss_fn.has_kl_reward and self.grpo.adv_estimator.name == "gdpo":
            raise ValueError(
                "loss_fn.use_kl_in_reward changes the sum of the rewards, which "
                "grpo.adv_estimator.name=gdpo does not read: set it to false"
            )
        return self
