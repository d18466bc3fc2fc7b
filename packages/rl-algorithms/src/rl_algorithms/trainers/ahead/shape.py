"""`RunShape`: the numbers of a run that determine the schedule's settings."""

from __future__ import annotations

from dataclasses import dataclass

from rl_algorithms.asynchronous.restarts import RestartPolicy
from rl_algorithms.asynchronous.settings import (
    ScheduleSettings,
    WaitLimits,
    WeightUpdates,
)
from rl_algorithms.trainers.settings.asynchronous_config import AsynchronousConfig

__all__ = ["RunShape"]


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The numbers of a run that determine the schedule's settings."""

    num_prompts: int
    """Number of prompts per step."""
    num_generations: int
    """Number of answers per prompt."""
    max_num_steps: int
    """Maximum number of steps of the whole run."""
    max_num_epochs: int | None
    """Maximum number of passes over the data; None for no limit."""
    first_step: int
    """Number of steps completed before this start."""
    max_turns: int
    """Maximum number of turns per conversation."""
    max_attempts: int
    """Number of attempts at a conversation, by `rollout.retry`."""
    seed: int
    """The run's seed."""
    updates_in_flight: bool = False
    """Whether the generator takes new weights while it samples."""
    max_trainer_restarts: int = 0
    """Maximum number of restarts of the trainer in a row."""

    @property
    def weight_updates(self) -> WeightUpdates:
        """Point at which the schedule sends the generator new weights."""
        # A conversation of several turns leaves its generator idle in between. Waiting
        # for it to end before new weights are loaded would stall the generator.
        mixes = self.updates_in_flight or self.max_turns > 1
        return "between_tokens" if mixes else "between_answers"

    def settings(
        self, config: AsynchronousConfig, prompts_per_epoch: int
    ) -> ScheduleSettings:
        """Return the settings of the schedule."""
        most = (config.max_staleness + 1) * self.num_prompts * self.num_generations
        slow_s = config.progress_limit_s
        return ScheduleSettings(
            num_prompts_per_step=self.num_prompts,
            num_generations_per_prompt=self.num_generations,
            prompts_per_epoch=prompts_per_epoch,
            max_num_epochs=self.max_num_epochs,
            max_num_steps=self.max_num_steps,
            max_staleness=config.max_staleness,
            weight_updates=self.weight_updates,
            max_groups=config.max_groups,
            # The desks batch whatever is waiting, so the schedule need not limit it.
            answers_per_generator=most,
            answers_per_environment=most,
            max_attempts=config.max_tries + self.max_attempts - 1,
            # Generator and environment restart their own workers. A failure that
            # reaches the schedule is one that they could not recover from.
            restarts=RestartPolicy(max_restarts=0),
            # The loop restarts the trainer, and pauses by itself if at all.
            trainer_restarts=RestartPolicy(
                max_restarts=self.max_trainer_restarts, backoff_s=0.0
            ),
            limits=WaitLimits(
                start_s=slow_s,
                answer_s=config.answer_limit_s,
                score_s=config.score_limit_s,
                load_s=slow_s,
                step_s=slow_s,
                save_s=slow_s,
                progress_s=slow_s,
            ),
        )
