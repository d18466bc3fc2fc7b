"""What the configurations of all algorithms that sample have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rl_algorithms.rollout.config import RolloutSettings
from rl_algorithms.trainers.config import TrainerConfig
from rl_algorithms.trainers.run_settings import RunSettings
from rl_algorithms.trainers.unread import OF_CONVERSATIONS, OF_PAIRS, Idle
from rl_models.config import PolicyConfig

__all__ = [
    "RolloutTrainerConfig",
    "SamplingSettings",
    "check_generation",
    "with_generation",
]


class SamplingSettings(RunSettings):
    """How many prompts and answers, for how long, and how it is measured."""

    num_prompts_per_step: int = Field(32, gt=0)
    """Prompts per step."""
    num_generations_per_prompt: int = Field(8, gt=0)
    """Answers that are sampled to each prompt: the group."""
    max_rollout_turns: int = Field(1, gt=0)
    """Answers per conversation, where the environment goes on."""
    val_batch_size: int = Field(256, gt=0)
    """Prompts per call of the generator in a validation."""
    max_val_samples: int | None = Field(256, gt=0)
    """At most so many held-out prompts; null: all."""
    val_num_generations_per_prompt: int = Field(1, gt=0)
    """Answers per held-out prompt."""
    val_greedy: bool = True
    """Take the most probable token in a validation instead of sampling."""
    accuracy_threshold: float | None = None
    """A held-out answer is right if its reward is at least this, and `val:accuracy` is
    the share of right ones; null: `val:accuracy` is what the environment calls
    accuracy, and missing where it calls nothing so, as a reward function does."""


class RolloutTrainerConfig(TrainerConfig):
    """A run that samples answers with `policy.generation`."""

    trains_branches: ClassVar[bool] = False
    """Whether the algorithm can train on conversations of several rows."""

    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """What to do about conversations that do not go as planned."""

    def unread(self) -> tuple[str, ...]:
        """Return the keys of algorithms that imitate, or learn from pairs."""
        return ("data.add_eos", *OF_CONVERSATIONS, *OF_PAIRS)

    def idle(self) -> tuple[Idle, ...]:
        """Return what is turned off, besides what is for every algorithm."""
        if self.rollout.retry.max_attempts > 1:
            return super().idle()
        retry = tuple(
            f"rollout.retry.{name}" for name in ("outcomes", "resample", "deadline_s")
        )
        return (*super().idle(), Idle("rollout.retry.max_attempts=1", retry))

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
