"""`ScheduleSettings`: the settings of the schedule of asynchronous training."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from rl_algorithms.asynchronous.restarts import RestartPolicy
from rl_algorithms.asynchronous.workers import TRAINER, Worker
from rl_distributed.errors import ConfigError

__all__ = ["ScheduleSettings", "WaitLimits", "WeightUpdates"]

WeightUpdates = Literal["between_answers", "between_tokens"]


@dataclass(frozen=True, kw_only=True)
class WaitLimits:
    """Deadlines in seconds."""

    start_s: float = 1_800.0
    """Start of a worker; for the trainer, including the restore of its checkpoint."""
    answer_s: float = 1_800.0
    """Sampling of an answer."""
    score_s: float = 600.0
    """Scoring of an answer."""
    load_s: float = 600.0
    """Loading of weights by a generator, until it confirms them."""
    step_s: float = 3_600.0
    """An optimizer step."""
    save_s: float = 3_600.0
    """Writing of a checkpoint."""
    progress_s: float = 14_400.0
    """Time without a new furthest step; the run then ends and reports its waits."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not value > 0:
                raise ConfigError(f"{limit.name} must be positive: got {value}")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The shape of a run and its limits."""

    num_prompts_per_step: int
    """Number of groups per optimizer step."""
    num_generations_per_prompt: int
    """Number of answers per group."""
    prompts_per_epoch: int
    """Number of prompts in a pass over the data."""
    max_num_epochs: int | None = 1
    """Maximum number of passes over the data; None for no limit."""
    max_num_steps: int | None = None
    """Maximum number of steps; None for no limit."""
    num_generators: int = 1
    """Number of workers that sample."""
    num_environments: int = 1
    """Number of workers that score."""
    max_staleness: int = 1
    """Maximum number of steps by which the oldest token of an answer may lag behind the
    step that trains on it; 0 is the synchronous order."""
    weight_updates: WeightUpdates = "between_answers"
    """Point at which a generator takes new weights: once it has no answer in flight, or
    at once, so that an answer may mix versions."""
    max_groups: int | None = None
    """Maximum number of groups between admission and the end of their step; None for as
    many as `max_staleness` can use, `(max_staleness + 1) * num_prompts_per_step`."""
    answers_per_generator: int = 256
    """Maximum number of answers that a generator samples at a time."""
    answers_per_environment: int = 64
    """Maximum number of answers that an environment scores at a time."""
    max_attempts: int = 3
    """Number of attempts at an answer before its group is dropped."""
    max_drops_in_row: int = 32
    """Maximum number of groups dropped without a finished one in between; one more ends
    the run."""
    checkpoint_period: int | None = None
    """Steps between checkpoints, besides the final one; None for only the final one."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    """Policy for restarting failed workers."""
    trainer_restarts: RestartPolicy | None = None
    """Policy for the trainer; None for that of the other workers."""
    limits: WaitLimits = field(default_factory=WaitLimits)
    """Deadlines of all waits."""

    def __post_init__(self) -> None:
        least = {"max_staleness": 0}
        for name in _COUNTS:
            value, low = getattr(self, name), least.get(name, 1)
            if value is None and name in _OPTIONAL:
                continue
            # True is an int in Python, and would pass as 1.
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(
                    f"{name} must be a whole number of at least {low}: got {value!r}"
                )
        if self.max_num_epochs is None and self.max_num_steps is None:
            raise ConfigError(
                "max_num_steps and max_num_epochs are both None: the run would never "
                "end; set one of them"
            )
        if self.max_groups is not None and self.max_groups < self.num_prompts_per_step:
            raise ConfigError(
                "max_groups must be at least num_prompts_per_step, or no step would "
                f"ever be full: got {self.max_groups} with "
                f"{self.num_prompts_per_step} prompts per step"
            )
        if self.weight_updates not in ("between_answers", "between_tokens"):
            raise ConfigError(
                "weight_updates must be between_answers or between_tokens: got "
                f"{self.weight_updates!r}"
            )

    def restarts_of(self, worker: Worker) -> RestartPolicy:
        """Return the policy for restarting a worker."""
        own = self.trainer_restarts if worker == TRAINER else None
        return self.restarts if own is None else own

    @property
    def group_limit(self) -> int:
        """Maximum number of groups that the schedule holds."""
        most = (self.max_staleness + 1) * self.num_prompts_per_step
        # More than `most` could never be trained on in time, whatever the user asks
        # for.
        return most if self.max_groups is None else min(most, self.max_groups)


_OPTIONAL = ("max_num_epochs", "max_num_steps", "max_groups", "checkpoint_period")
_COUNTS = (
    "num_prompts_per_step",
    "num_generations_per_prompt",
    "prompts_per_epoch",
    "num_generators",
    "num_environments",
    "max_staleness",
    "answers_per_generator",
    "answers_per_environment",
    "max_attempts",
    "max_drops_in_row",
    *_OPTIONAL,
)
