"""What the configurations of GRPO and PPO have in common."""

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
    """How rewards become what advantages are computed from."""

    reward_scaling: RewardScalingConfig | None = None
    """Map rewards to another range first; null: leave them."""
    reward_shaping: RewardShapingConfig | None = None
    """Penalties for long answers; null: none."""
    overlong_filtering: bool = False
    """Leave answers out of the loss that the length limit cut off."""
    asynchronous: AsynchronousConfig | None = None
    """Sample for later steps while an earlier one is trained; null: in turns."""

    @property
    def compares_group(self) -> bool:
        """Whether an answer learns only by comparison with others to its prompt."""
        return False


class PolicyGradientConfig(RolloutTrainerConfig):
    """A run that trains the policy on its own answers, weighted by advantages."""

    trains_branches: ClassVar[bool] = True
    rates_prompts: ClassVar[bool] = True

    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig)
    """The policy's loss."""
    mismatch: MismatchConfig = Field(default_factory=MismatchConfig)
    """What log-probs of sampler and trainer may differ by."""

    def idle(self) -> tuple[Idle, ...]:
        """Return what is turned off, besides what is for every algorithm."""
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
        """How answers are sampled ahead of training; None: in turns with it."""
        section = self.sampling
        assert isinstance(section, PolicyGradientSettings)
        return section.asynchronous

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
    """Fill in the longest answer as `with_generation`, and what follows from it."""
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
