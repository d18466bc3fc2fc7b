"""Configuration of PPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.losses.value_config import MseValueLossConfig
from rl_algorithms.trainers.settings.policy_gradient_config import (
    PolicyGradientConfig,
    PolicyGradientSettings,
    with_answer_lengths,
)
from rl_algorithms.trainers.settings.rollout_config import check_second_length
from rl_distributed.config import merge_configs
from rl_models.config import PolicyConfig

__all__ = ["PPOConfig", "PPOSettings"]


class PPOSettings(PolicyGradientSettings):
    """Section `ppo`."""

    num_generations_per_prompt: int = Field(1, gt=0)
    """Number of answers sampled for each prompt."""
    ppo_epochs: int = Field(4, gt=0)
    """Number of passes over the answers of a step, in optimizer steps of
    `policy.train_global_batch_size` rows; each pass has another order."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Number of initial steps that train the critic alone."""
    gae_gamma: float = Field(1.0, ge=0.0, le=1.0)
    """Discount per sampled token."""
    gae_lambda: float = Field(0.95, ge=0.0, le=1.0)
    """Lambda of the advantages: 0 relies on the critic alone, 1 on the rewards alone.
    """
    gae_lambda_value: float | None = Field(None, ge=0.0, le=1.0)
    """Lambda of the returns that the critic learns (1 in arXiv:2504.05118); null for
    that of the advantages."""
    bootstrap_truncated: bool = False
    """Whether to use the critic's value of the last state for the missing rest of a
    truncated answer (arXiv:1712.00378). With false, the answer ends at the limit, as it
    will when the model is used with the same limit."""
    target_kl: float | None = Field(None, gt=0.0)
    """Mean KL divergence from the policy before the step above which the policy makes
    no further pass over its answers; null for no limit. The critic makes all passes."""
    normalize_advantages: bool = True
    """Whether to normalize advantages to mean 0 and standard deviation 1 over the
    tokens of the step."""
    positive_above: float = 0.0
    """Reward before scaling and shaping above which an answer is successful, for
    `loss_fn.positive_nll_coef`."""

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if (
            self.max_num_steps is not None
            and self.critic_warmup_steps >= self.max_num_steps
        ):
            raise ValueError(
                "critic_warmup_steps must be less than max_num_steps "
                f"({self.max_num_steps}), or the policy would never be trained: got "
                f"{self.critic_warmup_steps}"
            )
        return self


class PPOConfig(PolicyGradientConfig):
    """Configuration of a PPO run."""

    ppo: PPOSettings = Field(default_factory=PPOSettings)
    """Settings of the algorithm."""
    critic: PolicyConfig
    """The critic. Keys that are not given, including the model, are taken from
    `policy`; the head is `value`."""
    loss_fn: ClippedPGLossConfig = Field(
        default_factory=lambda: ClippedPGLossConfig(reference_policy_kl_penalty=0.0)
    )
    """The policy's loss."""
    value_loss_fn: MseValueLossConfig = Field(default_factory=MseValueLossConfig)
    """The critic's loss."""

    def unread(self) -> tuple[str, ...]:
        """Return the keys of other algorithms, and those of a term without weight."""
        unused = () if self.loss_fn.positive_nll_coef > 0 else ("ppo.positive_above",)
        return (*super().unread(), *unused)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        filled = with_answer_lengths(data)
        complete = isinstance(filled, Mapping) and isinstance(
            filled.get("policy"), Mapping
        )
        return {**filled, "critic": _critic_section(filled)} if complete else filled

    @model_validator(mode="after")
    def _check_passes(self) -> Self:
        """Reject a bound that could not take effect."""
        if self.ppo.target_kl is None:
            return self
        if self.ppo.ppo_epochs == 1:
            raise ValueError(
                "ppo.target_kl ends the passes after the first one: got ppo_epochs=1; "
                "leave it out (null)"
            )
        if self.loss_fn.force_on_policy_ratio:
            raise ValueError(
                "ppo.target_kl needs the policy before the step, which "
                "loss_fn.force_on_policy_ratio does not use: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        if self.critic.head != "value":
            raise ValueError(
                f"critic.head must be value: got {self.critic.head!r}; leave it out"
            )
        check_second_length("critic", self.critic, self.policy)
        return self


def _critic_section(data: Mapping[str, Any]) -> Any:
    """Return the section `critic`, completed from `policy`."""
    given = data.get("critic")
    if given is not None and not isinstance(given, Mapping):
        return given
    given = dict(given or {})
    # A critic samples nothing, and has a head of its own.
    base = {k: v for k, v in data["policy"].items() if k not in ("generation", "head")}
    # Arguments for one class do not fit another.
    for section in ("optimizer", "scheduler"):
        own = given.get(section)
        if isinstance(own, Mapping) and "name" in own:
            base.pop(section, None)
    # Set for the critic, one of them would contradict the other, inherited from the
    # policy.
    for one, other in _EXCLUSIVE:
        if given.get(one) is not None and other not in given:
            base.pop(other, None)
    return {"head": "value", **merge_configs(base, given)}


_EXCLUSIVE = (
    ("dynamic_batching", "sequence_packing"),
    ("sequence_packing", "dynamic_batching"),
)
