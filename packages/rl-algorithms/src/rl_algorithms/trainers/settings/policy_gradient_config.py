"""Configuration shared by GRPO and PPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rl_algorithms.advantages.config import (
    RewardScalingConfig,
    RewardShapingConfig,
    with_buffer_lengths,
)
from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.trainers.settings.asynchronous_config import (
    AheadConfig,
    AheadSettings,
)
from rl_algorithms.trainers.settings.mismatch_config import MismatchConfig
from rl_algorithms.trainers.settings.rollout_config import with_generation
from rl_algorithms.trainers.settings.unused_keys import OF_KL, Idle

__all__ = ["PolicyGradientConfig", "PolicyGradientSettings", "with_answer_lengths"]


class PolicyGradientSettings(AheadSettings):
    """Preparation of rewards for the advantages."""

    reward_scaling: RewardScalingConfig | None = None
    """Mapping of rewards to another range; null for none."""
    reward_shaping: RewardShapingConfig | None = None
    """Penalties for long answers; null for none."""
    overlong_filtering: bool = False
    """Whether to exclude answers cut off by the length limit from the loss."""

    @property
    def compares_group(self) -> bool:
        """Whether an answer is judged only relative to others to its prompt."""
        return False


class PolicyGradientConfig(AheadConfig):
    """Configuration of a run that trains on the policy's own answers by advantages."""

    trains_branches: ClassVar[bool] = True
    rates_prompts: ClassVar[bool] = True

    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig)
    """The policy's loss."""
    mismatch: MismatchConfig = Field(default_factory=MismatchConfig)
    """Limit on the difference of log-probs between sampler and trainer."""

    def idle(self) -> tuple[Idle, ...]:
        """Return the disabled features, including those of every algorithm."""
        found = []
        if not self.loss_fn.needs_reference_logprobs:
            found.append(Idle("loss_fn.reference_policy_kl_penalty=0", OF_KL))
        for name in ("disable_ppo_ratio", "force_on_policy_ratio"):
            if getattr(self.loss_fn, name):
                keys = ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max")
                found.append(Idle(f"loss_fn.{name}=true", keys))
        return (*super().idle(), *found)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        return with_answer_lengths(data)

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        """Check that the loss can use answers of older weights, if there are any."""
        age = 0 if self.asynchronous is None else self.asynchronous.max_staleness
        if age > 0 and not self.loss_fn.use_importance_sampling_correction:
            raise ValueError(
                f"asynchronous.max_staleness={age} trains on answers of older weights, "
                "which the loss must weight by policy over sampler: set "
                "loss_fn.use_importance_sampling_correction=true, or max_staleness=0"
            )
        if age > 0 and self.loss_fn.force_on_policy_ratio:
            raise ValueError(
                f"asynchronous.max_staleness={age} trains on answers of older weights, "
                "and loss_fn.force_on_policy_ratio=true says that there are none: set "
                "it to false, or max_staleness=0"
            )
        return self


def with_answer_lengths(data: Any) -> Any:
    """Fill in the longest answer like `with_generation`, and values derived from it."""
    filled = with_generation(data)
    if not isinstance(filled, Mapping):
        return filled
    data = dict(filled)
    if not isinstance(data.get("policy"), Mapping):
        return data
    generation = data["policy"]["generation"]
    limit = (
        generation.get("max_new_tokens") if isinstance(generation, Mapping) else None
    )
    # Validation reports a wrong value later, with a better message.
    if not isinstance(limit, int):
        return data
    loss, wanted = data.get("loss_fn"), "fixed_length_normalizer"
    if isinstance(loss, Mapping) and loss.get(wanted) == "max_new_tokens":
        data["loss_fn"] = {**loss, wanted: limit}
    for name, section in data.items():
        # Only the algorithm's own section has this key.
        if isinstance(section, Mapping):
            shaping = section.get("reward_shaping")
            if isinstance(shaping, Mapping):
                filled = with_buffer_lengths(shaping, limit)
                data[name] = {**section, "reward_shaping": filled}
    return data
