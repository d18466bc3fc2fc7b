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
    AsynchronousConfig,
    check_asynchronous,
)
from rl_algorithms.trainers.settings.mismatch_config import MismatchConfig
from rl_algorithms.trainers.settings.rollout_config import (
    RolloutTrainerConfig,
    SamplingSettings,
    with_generation,
)
from rl_algorithms.trainers.settings.unused_keys import OF_KL, Idle

__all__ = ["PolicyGradientConfig", "PolicyGradientSettings", "with_answer_lengths"]


class PolicyGradientSettings(SamplingSettings):
    """Preparation of rewards for the advantages, and sampling ahead."""

    reward_scaling: RewardScalingConfig | None = None
    """Mapping of rewards to another range; null for none."""
    reward_shaping: RewardShapingConfig | None = None
    """Penalties for long answers; null for none."""
    overlong_filtering: bool = False
    """Whether to exclude answers cut off by the length limit from the loss."""
    asynchronous: AsynchronousConfig | None = None
    """Sampling for later steps while an earlier one trains; null for the synchronous
    order."""

    @property
    def compares_group(self) -> bool:
        """Whether an answer is judged only relative to others to its prompt."""
        return False


class PolicyGradientConfig(RolloutTrainerConfig):
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

    @property
    def asynchronous(self) -> AsynchronousConfig | None:
        """Settings of sampling ahead of training; None for the synchronous order."""
        section = self.sampling
        assert isinstance(section, PolicyGradientSettings)
        return section.asynchronous

    @property
    def updates_in_flight(self) -> bool:
        """Whether the generator takes new weights while it samples."""
        asynchronous = self.asynchronous
        return asynchronous is not None and asynchronous.updates_in_flight

    @model_validator(mode="after")
    def _check_asynchronous(self) -> Self:
        if self.asynchronous is not None:
            check_asynchronous(
                self.asynchronous,
                self.sampling.num_prompts_per_step,
                self.rollout,
                self.loss_fn,
                self.data,
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
