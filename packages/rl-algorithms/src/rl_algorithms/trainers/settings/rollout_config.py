"""Configuration shared by the algorithms that sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rl_algorithms.data.config import DataKind
from rl_algorithms.rollout.config import RolloutSettings
from rl_algorithms.trainers.settings.batch_plan import BatchPlan
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.run_settings import RunSettings
from rl_algorithms.trainers.settings.unused_keys import OF_CONVERSATIONS, OF_PAIRS, Idle
from rl_distributed.cluster.config import ClusterSize
from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig
from rl_models.row_length import default_row_length
from rl_models.training.worker_sampler import shares_weights

__all__ = [
    "RolloutTrainerConfig",
    "SamplingSettings",
    "TrainingRolloutSettings",
    "check_generation",
    "check_generation_cluster",
    "check_second_length",
    "with_generation",
    "with_row_length",
]

_LONGEST_UNASKED = 256


class SamplingSettings(RunSettings):
    """Numbers of prompts and answers, limits of the run, and validation."""

    num_prompts_per_step: int = Field(32, gt=0)
    """Number of prompts per step."""
    num_generations_per_prompt: int = Field(8, gt=0)
    """Number of answers sampled for each prompt, which form its group."""
    max_rollout_turns: int = Field(1, gt=0)
    """Maximum number of answers per conversation, if the environment continues it."""
    val_batch_size: int = Field(256, gt=0)
    """Number of prompts per call of the generator in a validation."""
    max_val_samples: int | None = Field(None, gt=0)
    """Number of held-out prompts to use, from the first; null for all."""
    val_num_generations_per_prompt: int = Field(1, gt=0)
    """Number of answers per held-out prompt."""
    val_greedy: bool = True
    """Whether to take the most likely token in a validation instead of sampling."""
    accuracy_threshold: float | None = None
    """Minimum reward of a right answer, for `val:accuracy`, the share of right answers
    to held-out prompts. With null, `val:accuracy` is the environment's own accuracy, if
    it reports one; a reward function does not."""


class TrainingRolloutSettings(RolloutSettings):
    """Section `rollout` of a training run: adds the answers kept for people to read."""

    kept_per_step: int = Field(4, ge=0)
    """Number of answers per training step to keep in the folder `rollouts` of the run,
    for `rl report` and `rl watch`: the best and the worst of some groups. 0 for none.
    """
    kept_max_bytes: int = Field(1 << 29, ge=1 << 20)
    """Size of that folder above which answers of steps between the first and the newest
    are removed, evenly over the run."""
    max_rejected_rate: float = Field(0.1, ge=0.0, le=1.0)
    """Share of the high-scoring answers that a second check may reject (environment
    `second_check`) before the run warns of reward hacking; 1 for no warning."""
    tables_every: int = Field(10, ge=0)
    """Number of steps between two tables of kept answers, for the sinks that show
    tables: tensorboard, wandb, mlflow, trackio. Prompts and answers are sent to the
    sink, as are those of every validation. 0 for no tables."""


class RolloutTrainerConfig(TrainerConfig):
    """Configuration of a run that samples answers with `policy.generation`."""

    trains_branches: ClassVar[bool] = False
    """Whether the algorithm can train on conversations that span several rows."""

    data_kind: ClassVar[DataKind | None] = "prompts"

    generation_cluster: ClusterSize | None = None
    """Machines for the generator alone, beside those of `cluster`; needed to sample
    ahead of training on GPUs. null: it shares the workers' places in `cluster`, and
    takes turns with training there."""
    rollout: TrainingRolloutSettings = Field(default_factory=TrainingRolloutSettings)
    """Handling of conversations that do not go as planned, and of answers to keep."""

    def unread(self) -> tuple[str, ...]:
        """Return the keys read only by algorithms that imitate or learn from pairs."""
        return ("data.add_eos", *OF_CONVERSATIONS, *OF_PAIRS)

    def idle(self) -> tuple[Idle, ...]:
        """Return the disabled features, including those of every algorithm."""
        found = [*super().idle()]
        if self.rollout.retry.max_attempts == 1:
            names = ("outcomes", "resample", "deadline_s")
            retry = tuple(f"rollout.retry.{name}" for name in names)
            found.append(Idle("rollout.retry.max_attempts=1", retry))
        if self.env is not None and self.env.name == "agent":
            section = next(
                name
                for name in type(self).model_fields
                if isinstance(getattr(self, name), SamplingSettings)
            )
            turns = (f"{section}.max_rollout_turns",)
            found.append(Idle("env.name=agent (which has max_calls)", turns))
        if not self.rollout.kept_per_step:
            kept = ("rollout.kept_max_bytes",)
            found.append(Idle("rollout.kept_per_step=0", kept))
        return tuple(found)

    @property
    def sampling_cluster(self) -> ClusterSize | None:
        """See `TrainerConfig`."""
        return self.generation_cluster

    @property
    def sampling(self) -> SamplingSettings:
        """The algorithm's own section."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return next(value for value in values if isinstance(value, SamplingSettings))

    def plan_batches(self) -> BatchPlan:
        """Return the batch sizes; a step has a group of answers for each prompt."""
        prompts = self.sampling.num_prompts_per_step
        group = self.sampling.num_generations_per_prompt
        return BatchPlan(
            prompts,
            group,
            self.policy.train_global_batch_size or prompts * group,
            self.data_parallel_size,
            self.policy.train_micro_batch_size,
        )

    def check_scorer(self, *, is_given: bool) -> None:
        """Check that something rewards the answers."""
        if not is_given:
            raise ConfigError(
                "nothing rewards the answers that are sampled: name an environment in "
                "the section env (env.name=math; env.name=reward "
                "env.settings.file=reward.py for a function of your own), or in Python "
                "pass reward_fn or environment"
            )

    @model_validator(mode="after")
    def _check_branches(self) -> Self:
        if self.rollout.on_template_rewrite == "branch" and not self.trains_branches:
            raise ValueError(
                "rollout.on_template_rewrite=branch splits a conversation into several "
                "training rows, which this algorithm cannot train on: use a chat "
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
        check_generation_cluster(self.policy, self.generation_cluster)
        return self


def check_generation(policy: PolicyConfig) -> None:
    """Check that answers can be sampled and leave room for a prompt.

    Raises:
        ValueError: They cannot be sampled, or are too long.
    """
    if policy.generation is None:
        raise ValueError(
            "policy.generation is null, but the algorithm samples: give it"
        )
    longest, tokens = (
        policy.max_total_sequence_length,
        policy.generation.max_new_tokens,
    )
    if longest is not None and tokens >= longest:
        raise ValueError(
            "policy.generation.max_new_tokens must leave room for the prompt in "
            f"policy.max_total_sequence_length ({longest}): got {tokens}"
        )


def check_generation_cluster(policy: PolicyConfig, apart: ClusterSize | None) -> None:
    """Check that a generator with machines of its own has workers of its own.

    Raises:
        ValueError: It samples in the workers that train.
    """
    if apart is None or not shares_weights(policy):
        return
    assert policy.generation is not None
    raise ValueError(
        "generation_cluster is for a generator with workers of its own: got "
        f"policy.generation.backend={policy.generation.backend}, which samples in the "
        "workers that train; use another one (huggingface, vllm), or set "
        "generation_cluster to null"
    )


def check_second_length(name: str, second: PolicyConfig, policy: PolicyConfig) -> None:
    """Check that a second model can process the rows of the policy.

    Raises:
        ValueError: Its rows are shorter.
    """
    longest, own = policy.max_total_sequence_length, second.max_total_sequence_length
    if longest is not None and own is not None and own < longest:
        raise ValueError(
            f"{name}.max_total_sequence_length must be at least that of policy "
            f"({longest}): got {own}; lower policy.max_total_sequence_length"
        )


def with_generation(data: Any) -> Any:
    """Fill in the longest answer: by default, half of a row.

    If the row length is the model's own, the default is at most 256 tokens, because
    half the context of a current model takes longer than anyone wants to wait for.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("policy"), Mapping):
        return data
    is_given = data["policy"].get("max_total_sequence_length") is not None
    data = with_row_length(data)
    policy = dict(data["policy"])
    if policy.get("generation") is None:
        policy["generation"] = {}
    longest = policy.get("max_total_sequence_length")
    if isinstance(policy["generation"], Mapping):
        if longest is None:
            # Twice, as half of it becomes the length of answers.
            longest = 2 * _LONGEST_UNASKED
        if isinstance(longest, int) and longest > 1:
            half = max(1, longest // 2)
            default = half if is_given else min(half, _LONGEST_UNASKED)
            policy["generation"] = {"max_new_tokens": default} | dict(
                policy["generation"]
            )
    return {**data, "policy": policy}


def with_row_length(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in the longest row that fits all models of a run, if none is set.

    Args:
        data: A whole configuration, with a section `policy`.
    """
    policy = data["policy"]
    if policy.get("max_total_sequence_length") is not None:
        return data
    lengths = [default_row_length(policy)]
    for name in ("critic", "teacher"):
        section = data.get(name)
        # A name alone stands for a section with that model.
        if isinstance(section, str | Path):
            section = {"model_name": section}
        if isinstance(section, Mapping):
            lengths.append(
                section.get("max_total_sequence_length") or default_row_length(section)
            )
    # Values of other types are left to the validation.
    known = [length for length in lengths if isinstance(length, int)]
    if lengths[0] is None or not known:
        return data
    return {**data, "policy": {**policy, "max_total_sequence_length": min(known)}}
