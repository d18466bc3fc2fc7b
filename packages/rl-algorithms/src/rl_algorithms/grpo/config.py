"""Configuration of GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rl_algorithms.advantages.config import (
    AdvantageConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.trainers.settings.mismatch_config import MismatchConfig
from rl_algorithms.trainers.settings.rollout_config import (
    RolloutTrainerConfig,
    SamplingSettings,
    with_generation,
)
from rl_algorithms.trainers.settings.unused_keys import OF_KL, Idle

__all__ = ["GRPOConfig", "GRPOSettings", "idle_in_loss", "with_lengths"]


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
    seq_logprob_error_threshold: float | None = Field(None, ge=1.0)
    """Leave answers out of the loss on whose tokens the sampler and the trainer
    disagree: whose mean of `exp|difference of log-probs|` is above this; null: none."""
    drop_zero_variance_groups: bool = False
    """Leave groups out whose answers all earn the same, without sampling others."""
    use_dynamic_sampling: bool = False
    """Sample further prompts until the step has all its groups with variance."""
    dynamic_sampling_max_gen_batches: int = Field(10, gt=0)
    """Maximum number of batches sampled for one step."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Never ask for a reference policy; needs a KL penalty of 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.use_dynamic_sampling and self.drop_zero_variance_groups:
            raise ValueError(
                "use_dynamic_sampling and drop_zero_variance_groups exclude each "
                "other: the first replaces groups, the second leaves them out"
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


class GRPOConfig(RolloutTrainerConfig):
    """Everything a GRPO run needs."""

    trains_branches: ClassVar[bool] = True

    grpo: GRPOSettings = Field(default_factory=GRPOSettings)
    """The algorithm."""
    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig)
    """The loss."""
    mismatch: MismatchConfig = Field(default_factory=MismatchConfig)
    """What log-probs of sampler and trainer may differ by."""

    def idle(self) -> tuple[Idle, ...]:
        """Return what is turned off, besides what is for every algorithm."""
        found = [*super().idle(), *idle_in_loss(self.loss_fn)]
        if not self.grpo.use_dynamic_sampling:
            keys = ("grpo.dynamic_sampling_max_gen_batches",)
            found.append(Idle("grpo.use_dynamic_sampling=false", keys))
        return tuple(found)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        filled = with_generation(data)
        complete = isinstance(filled, Mapping) and isinstance(
            filled.get("policy"), Mapping
        )
        return with_lengths(dict(filled), "grpo") if complete else filled

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


def idle_in_loss(loss_fn: ClippedPGLossConfig) -> list[Idle]:
    """Return what options of the loss turn off."""
    found = []
    if not loss_fn.needs_reference_logprobs:
        found.append(Idle("loss_fn.reference_policy_kl_penalty=0", OF_KL))
    for name in ("disable_ppo_ratio", "force_on_policy_ratio"):
        if getattr(loss_fn, name):
            keys = ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max")
            found.append(Idle(f"loss_fn.{name}=true", keys))
    return found


def with_lengths(data: dict[str, Any], section: str) -> dict[str, Any]:
    """Fill in the lengths that follow from the longest answer.

    Args:
        data: A whole configuration.
        section: Where `reward_shaping` is.
    """
    generation = data["policy"]["generation"]
    limit = (
        generation.get("max_new_tokens") if isinstance(generation, Mapping) else None
    )
    if not isinstance(limit, int):
        return data
    loss, own = data.get("loss_fn"), data.get(section)
    wanted = "fixed_length_normalizer"
    if isinstance(loss, Mapping) and loss.get(wanted) == "max_new_tokens":
        data["loss_fn"] = {**loss, wanted: limit}
    if isinstance(own, Mapping) and isinstance(own.get("reward_shaping"), Mapping):
        shaping = _with_overlong_lengths(own["reward_shaping"], limit)
        data[section] = {**own, "reward_shaping": shaping}
    return data


def _with_overlong_lengths(shaping: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Put the lengths that `overlong_buffer_fraction` stands for in their places."""
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
