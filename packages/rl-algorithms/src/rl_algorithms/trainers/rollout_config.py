"""What the configurations of all algorithms that sample have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rl_algorithms.rollout.config import RolloutSettings
from rl_algorithms.trainers.config import TrainerConfig
from rl_algorithms.trainers.mismatch import MismatchConfig
from rl_distributed.config import Config
from rl_models.config import PolicyConfig

__all__ = [
    "RolloutTrainerConfig",
    "SamplingSettings",
    "check_generation",
    "with_generation",
]


class SamplingSettings(Config):
    """How many prompts and answers, for how long, and how it is measured."""

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
    def _check_limits(self) -> Self:
        if self.max_num_epochs is None and self.max_num_steps is None:
            raise ValueError(
                "max_num_epochs and max_num_steps are both null: the run would never "
                "end; set one of them"
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


class RolloutTrainerConfig(TrainerConfig):
    """A run that samples answers with `policy.generation`."""

    trains_branches: ClassVar[bool] = False
    """Whether the algorithm can train on conversations of several rows."""

    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """What to do about conversations that do not go as planned."""
    mismatch: MismatchConfig = Field(default_factory=MismatchConfig)
    """What log-probs of sampler and trainer may differ by."""

    @model_validator(mode="after")
    def _check_branches(self) -> Self:
        if self.rollout.on_template_rewrite == "branch" and not self.trains_branches:
            raise ValueError(
                "rollout.on_template_rewrite=branch makes several training rows of a "
                "conversation, which this algorithm cannot train on: use a chat "
                "template that leaves earlier messages alone, or another algorithm"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        return with_generation(data)

    @model_validator(mode="after")
    def _check_generation(self) -> Self:
        check_generation(self.policy)
        return self


def check_generation(policy: PolicyConfig) -> None:
    """Check that answers can be sampled, and fit behind a prompt.

    Raises:
        ValueError: They cannot.
    """
    if policy.generation is None:
        raise ValueError(
            "policy.generation is null, but the algorithm samples: give it"
        )
    longest, tokens = (
        policy.max_total_sequence_length,
        policy.generation.max_new_tokens,
    )
    if tokens >= longest:
        raise ValueError(
            "policy.generation.max_new_tokens must leave room for the prompt in "
            f"policy.max_total_sequence_length ({longest}): got {tokens}"
        )


def with_generation(data: Any) -> Any:
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
