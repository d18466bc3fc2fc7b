"""Section `asynchronous`, and the configuration of the algorithms that have it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rl_algorithms.asynchronous.settings import WeightUpdates
from rl_algorithms.data.config import DataConfig
from rl_algorithms.rollout.config import RolloutSettings
from rl_algorithms.trainers.settings.rollout_config import (
    RolloutTrainerConfig,
    SamplingSettings,
)
from rl_distributed.config import Config

__all__ = ["AheadConfig", "AheadSettings", "AsynchronousConfig"]


class AsynchronousConfig(Config):
    """Section `asynchronous`: sampling for later steps while an earlier one trains."""

    max_staleness: int = Field(default=1, ge=0)
    """Maximum number of steps by which the oldest token of an answer may lag behind the
    step that trains on it. With 0, nothing is sampled ahead, as without this section.
    """
    weight_updates: WeightUpdates = "between_answers"
    """Point at which the generator takes new weights: `between_answers` once it samples
    nothing, in conversations of several turns also between two turns; `between_tokens`
    at once, and answers in flight go on with them. For the generation backends
    huggingface, and vllm with `vllm.async_engine`."""
    max_groups: int | None = Field(default=None, gt=0)
    """Maximum number of prompts being sampled, waiting for their step or in training;
    null for as many as `max_staleness` can use, (max_staleness + 1) x
    num_prompts_per_step."""
    max_tries: int = Field(default=3, ge=1)
    """Number of attempts at an overdue answer before its prompt is dropped."""
    answer_limit_s: float = Field(default=1800.0, gt=0)
    """Deadline in seconds for an answer, from its request to the last turn of its
    conversation."""
    score_limit_s: float = Field(default=900.0, gt=0)
    """Deadline in seconds for the reward of an answer."""
    progress_limit_s: float = Field(default=14400.0, gt=0)
    """Seconds without another step, including validations and checkpoints, after which
    the run ends and reports what it was waiting for."""
    event_log: bool = False
    """Whether to write all events and decisions to `asynchronous/events_*.jsonl` in the
    run folder, about 1.5 KB per answer, for
    `rl_algorithms.asynchronous.event_log.replay`."""

    @property
    def updates_in_flight(self) -> bool:
        """Whether the generator takes new weights while it samples."""
        return self.weight_updates == "between_tokens"


class AheadSettings(SamplingSettings):
    """Settings of an algorithm that can sample ahead of training."""

    asynchronous: AsynchronousConfig | None = None
    """Sampling for later steps while an earlier one trains; null for the synchronous
    order."""


class AheadConfig(RolloutTrainerConfig):
    """Configuration of a run that can sample ahead of training."""

    @property
    def asynchronous(self) -> AsynchronousConfig | None:
        """Settings of sampling ahead of training; None for the synchronous order."""
        section = self.sampling
        assert isinstance(section, AheadSettings)
        return section.asynchronous

    @property
    def updates_in_flight(self) -> bool:
        """Whether the generator takes new weights while it samples."""
        asynchronous = self.asynchronous
        return asynchronous is not None and asynchronous.updates_in_flight

    @model_validator(mode="after")
    def _check_asynchronous(self) -> Self:
        if self.asynchronous is not None:
            _check_asynchronous(
                self.asynchronous,
                self.sampling.num_prompts_per_step,
                self.rollout,
                self.data,
            )
        return self


def _check_asynchronous(
    asynchronous: AsynchronousConfig,
    num_prompts: int,
    rollout: RolloutSettings,
    data: DataConfig,
) -> None:
    """Check that the other settings of a run allow sampling ahead.

    Args:
        asynchronous: The section.
        num_prompts: Number of prompts per step.
        rollout: Handling of failures.
        data: Source of the prompts.

    Raises:
        ValueError: A setting excludes it.
    """
    age, groups = asynchronous.max_staleness, asynchronous.max_groups
    if groups is not None and groups < num_prompts:
        raise ValueError(
            "asynchronous.max_groups must be at least num_prompts_per_step, or no step "
            f"would ever be full: got {groups} with {num_prompts}; raise it, or set it "
            "to null"
        )
    if age == 0 and asynchronous.updates_in_flight:
        raise ValueError(
            "asynchronous.weight_updates=between_tokens needs max_staleness above 0: "
            "got 0, where no answer is in flight when new weights come; raise it, or "
            "set weight_updates to between_answers"
        )
    if rollout.max_staleness is not None:
        raise ValueError(
            "rollout.max_staleness drops rows that are too old, and with asynchronous "
            f"there are none: got {rollout.max_staleness}; leave it out (null), and "
            "set asynchronous.max_staleness"
        )
    if rollout.retry.max_attempts > 1 and rollout.retry.resample == "group":
        raise ValueError(
            "rollout.retry.resample=group needs the answers of a prompt to end "
            "together, which they do not with asynchronous: set it to row"
        )
    if data.pass_rate_filter is not None:
        raise ValueError(
            "asynchronous draws prompts before the answers to earlier ones are "
            "rewarded, which data.pass_rate_filter needs: leave it out (null), or "
            "set asynchronous to null"
        )
    if data.streaming:
        raise ValueError(
            "asynchronous takes prompts by their position in the data, which a stream "
            "does not have: set data.streaming=false, or asynchronous to null"
        )
