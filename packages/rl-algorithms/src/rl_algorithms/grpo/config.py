"""Configuration of GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from rl_algorithms.advantages.config import (
    AdvantageConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.trainers.config import TrainerConfig
from rl_distributed.config import Config

__all__ = ["GRPOConfig", "GRPOSettings"]


class GRPOSettings(Config):
    """Section `grpo`."""

    num_prompts_per_step: int = Field(32, gt=0)
    """Prompts per step."""
    num_generations_per_prompt: int = Field(8, gt=0)
    """Answers that are sampled to each prompt: the group."""
    max_num_epochs: int | None = Field(1, gt=0)
    """Passes over the prompts; null: no limit."""
    max_num_steps: int | None = Field(None, gt=0)
    """Steps; null: no limit."""
    max_rollout_turns: int = Field(1, gt=0)
    """Answers per conversation, where the environment goes on."""
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
    val_period: int = Field(10, ge=0)
    """Steps between two validations; 0: none."""
    val_start_at: int = -1
    """No periodic validation before this step."""
    val_at_start: bool = False
    """Also validate before the first step."""
    val_at_end: bool = False
    """Also validate after the last step."""
    val_batch_size: int = Field(256, gt=0)
    """Prompts per call of the generator in a validation."""
    max_val_samples: int | None = Field(256, gt=0)
    """At most so many held-out prompts; null: all."""
    val_num_generations_per_prompt: int = Field(1, gt=0)
    """Answers per held-out prompt."""
    val_greedy: bool = True
    """Take the most probable token in a validation instead of sampling."""
    stop_at_validation_metric: str | None = None
    """Name such as `val:accuracy` whose goal ends the run; null: none."""
    stop_at_validation_threshold: float | None = None
    """The goal."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_num_epochs is None and self.max_num_steps is None:
            raise ValueError(
                "max_num_epochs and max_num_steps are both null: the run would never "
                "end; set one of them"
            )
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
        if (self.stop_at_validation_metric is None) != (
            self.stop_at_validation_threshold is None
        ):
            raise ValueError(
                "stop_at_validation_metric and stop_at_validation_threshold belong "
                f"together: got {self.stop_at_validation_metric!r} and "
                f"{self.stop_at_validation_threshold!r}"
            )
        return self


class GRPOConfig(TrainerConfig):
    """Everything a GRPO run needs."""

    output_dir: str = "runs/grpo"
    """Folder of the run; see `TrainerConfig`."""
    grpo: GRPOSettings = Field(default_factory=GRPOSettings)
    """The algorithm."""
    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig)
    """The loss."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Sample answers of half the context, unless told otherwise."""
        if not isinstance(data, Mapping) or not isinstance(data.get("policy"), Mapping):
            return data
        policy = dict(data["policy"])
        if policy.get("generation") is None:
            policy["generation"] = {}
        if isinstance(policy["generation"], Mapping):
            longest = policy.get("max_total_sequence_length", 512)
            if isinstance(longest, int) and longest > 1:
                default = {"max_new_tokens": max(1, longest // 2)}
                policy["generation"] = default | dict(policy["generation"])
        return {**data, "policy": policy}

    @model_validator(mode="after")
    def _check(self) -> Self:
        generation = self.policy.generation
        if generation is None:
            raise ValueError("policy.generation is null, but GRPO samples: give it")
        longest = self.policy.max_total_sequence_length
        if generation.max_new_tokens >= longest:
            raise ValueError(
                "policy.generation.max_new_tokens must leave room for the prompt in "
                f"policy.max_total_sequence_length ({longest}): got "
                f"{generation.max_new_tokens}"
            )
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
