"""`ScheduleSettings`: what the schedule of asynchronous training goes by."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from rl_algorithms.asynchronous.restarts import RestartPolicy
from rl_distributed.errors import ConfigError

__all__ = ["ScheduleSettings", "WaitLimits", "WeightUpdates"]

WeightUpdates = Literal["between_answers", "between_tokens"]


@dataclass(frozen=True, kw_only=True)
class WaitLimits:
    """Seconds after which the schedule stops waiting for something."""

    start_s: float = 1_800.0
    """A worker starts; the trainer also restores its checkpoint."""
    answer_s: float = 1_800.0
    """An answer is sampled."""
    score_s: float = 600.0
    """An answer is scored."""
    load_s: float = 600.0
    """A generator loads weights and confirms them."""
    step_s: float = 3_600.0
    """An optimizer step."""
    save_s: float = 3_600.0
    """A checkpoint is written."""
    progress_s: float = 14_400.0
    """No step beyond those trained before; then the run ends with what it waits for."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not value > 0:
                raise ConfigError(f"{limit.name} must be positive: got {value}")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The shape of a run, and its limits."""

    num_prompts_per_step: int
    """Groups that an optimizer step trains on."""
    num_generations_per_prompt: int
    """Answers of a group."""
    prompts_per_epoch: int
    """Prompts that a pass over the data hands out."""
    max_num_epochs: int | None = 1
    """Passes over the data; None: no limit."""
    max_num_steps: int | None = None
    """Steps of the run; None: no limit."""
    num_generators: int = 1
    """Replicas that sample."""
    num_environments: int = 1
    """Workers that score."""
    max_staleness: int = 1
    """Steps that the oldest token of an answer may lie behind the step that trains on
    it; 0 is the synchronous order."""
    weight_updates: WeightUpdates = "between_answers"
    """When a generator takes new weights: once it has no answer under way, or at once,
    so that an answer carries several versions."""
    max_groups: int | None = None
    """Groups between admission and the end of their step; None: the most that
    `max_staleness` can use, `(max_staleness + 1) * num_prompts_per_step`."""
    answers_per_generator: int = 256
    """Answers that a generator samples at a time."""
    answers_per_environment: int = 64
    """Answers that an environment scores at a time."""
    max_attempts: int = 3
    """How often an answer is tried before its group is dropped."""
    max_drops_in_row: int = 32
    """Groups that may be dropped with none finished in between; more end the run."""
    checkpoint_period: int | None = None
    """Steps between checkpoints, besides the one at the end; None: only that one."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    """How often failed workers are started again."""
    limits: WaitLimits = field(default_factory=WaitLimits)
    """How long anything may take."""

    def __post_init__(self) -> None:
        least = {"max_staleness": 0}
        for name in _COUNTS:
            value, low = getattr(self, name), least.get(name, 1)
            if value is None and name in _OPTIONAL:
                continue
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

    @property
    def group_limit(self) -> int:
        """Groups that the schedule holds at most."""
        most = (self.max_staleness + 1) * self.num_prompts_per_step
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
