"""Configuration of distillation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rl_algorithms.data.config import DataKind
from rl_algorithms.losses.distillation_config import DistillationLossConfig
from rl_algorithms.trainers.settings.asynchronous_config import (
    AheadConfig,
    AheadSettings,
)
from rl_algorithms.trainers.settings.rollout_config import (
    check_generation,
    check_generation_cluster,
    check_second_length,
    with_generation,
    with_row_length,
)
from rl_algorithms.trainers.settings.unused_keys import OF_PAIRS
from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig

__all__ = ["DistillationConfig", "DistillationSettings"]

_OF_THE_STUDENT = (
    "max_total_sequence_length",
    "precision",
    "logprob_batch_size",
    "num_threads",
    "dynamic_batching",
    "sequence_packing",
)
"""Keys that the teacher inherits from `policy` unless its section sets them."""


_OF_TRAINING = (
    "train_global_batch_size",
    "train_micro_batch_size",
    "max_grad_norm",
    "max_skipped_steps",
    "optimizer",
    "scheduler",
    "generation",
)
"""Keys not read for a model that is never trained."""
_OF_SAMPLING = (
    "env",
    "generation_cluster",
    "rollout",
    "distillation.max_rollout_turns",
    "distillation.val_num_generations_per_prompt",
    "distillation.val_greedy",
    "distillation.accuracy_threshold",
)
"""Keys not read for a student that learns from answers in the data."""


class DistillationSettings(AheadSettings):
    """Section `distillation`."""

    on_policy: bool = True
    """Whether to train on answers that the student samples; false for the answers in
    the data, without any sampling."""
    num_generations_per_prompt: int = Field(1, gt=0)
    """Number of answers that the student samples for each prompt."""
    topk_logits_k: int = Field(64, gt=0)
    """Number of most likely tokens that the teacher provides at each position; at most
    the size of the vocabulary."""

    @model_validator(mode="after")
    def _check_off_policy(self) -> Self:
        if not self.on_policy and self.num_generations_per_prompt != 1:
            raise ValueError(
                "num_generations_per_prompt belongs to on_policy=true: got "
                f"{self.num_generations_per_prompt} with on_policy=false; leave it out"
            )
        if not self.on_policy and self.asynchronous is not None:
            raise ValueError(
                "asynchronous samples ahead of training, and with on_policy=false "
                "nothing is sampled: leave it out (null), or set on_policy=true"
            )
        return self


def _or_a_name(schema: dict[str, Any]) -> None:
    """Tell editors that a name or folder may replace the section."""
    section = dict(schema)
    # In place, because pydantic ignores what the function returns.
    schema.clear()
    schema["anyOf"] = [section, {"type": "string"}]


class DistillationConfig(AheadConfig):
    """Configuration of a distillation; `policy` is the student."""

    trains_branches: ClassVar[bool] = True

    teacher: PolicyConfig = Field(json_schema_extra=_or_a_name)
    """The teacher, which is never trained; may be just a name or folder. Lengths,
    precision and batches that it does not set are taken from `policy`."""
    distillation: DistillationSettings = Field(default_factory=DistillationSettings)
    """Settings of the algorithm."""
    loss_fn: DistillationLossConfig = Field(default_factory=DistillationLossConfig)
    """The loss."""

    def unread(self) -> tuple[str, ...]:
        """Return the teacher's keys of training and, off-policy, those of sampling."""
        teacher = tuple(f"teacher.{name}" for name in _OF_TRAINING)
        if self.distillation.on_policy:
            return (*super().unread(), *teacher)
        return (*OF_PAIRS, *_OF_SAMPLING, *teacher)

    def kind_of_data(self) -> DataKind:
        """Return the kind of the data rows: off-policy, they include answers."""
        return "prompts" if self.distillation.on_policy else "demonstrations"

    def check_scorer(self, *, is_given: bool) -> None:
        """Check that several turns have an environment; rewards are not needed."""
        turns = self.distillation.max_rollout_turns
        if self.distillation.on_policy and not is_given and turns > 1:
            raise ConfigError(
                "distillation.max_rollout_turns needs an environment that continues "
                f"after an answer: got {turns} without one; name it in the section "
                "env, in Python pass environment, or leave the turns out (1)"
            )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Fill in the length of answers, and complete the teacher from the student."""
        if not isinstance(data, Mapping) or not isinstance(data.get("policy"), Mapping):
            return data
        settings = data.get("distillation")
        # Off-policy nothing is sampled, so no length of answers is filled in.
        if not (isinstance(settings, Mapping) and settings.get("on_policy") is False):
            data = with_generation(data)
        data = with_row_length(data)
        policy, filled = data["policy"], dict(data)
        teacher = filled.get("teacher")
        if isinstance(teacher, str | Path):
            teacher = {"model_name": str(teacher)}
        if isinstance(teacher, Mapping):
            own = {name: policy[name] for name in _OF_THE_STUDENT if name in policy}
            filled["teacher"] = own | dict(teacher)
        return filled

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        check_second_length("teacher", self.teacher, self.policy)
        return self

    @model_validator(mode="after")
    def _check_generation(self) -> Self:
        """Check that sampled answers fit, if any are sampled."""
        if self.distillation.on_policy:
            check_generation(self.policy)
            check_generation_cluster(self.policy, self.generation_cluster)
        return self
