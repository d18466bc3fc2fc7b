"""`RunShape`: the numbers of a run, and what the schedule goes by."""

from __future__ import annotations

from dataclasses import dataclass

from rl_algorithms.asynchronous.restarts import RestartPolicy
from rl_algorithms.asynchronous.settings import ScheduleSettings, WaitLimits
from rl_algorithms.trainers.settings.asynchronous_config import AsynchronousConfig

__all__ = ["RunShape"]


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The numbers of a run that the schedule goes by."""

    num_prompts: int
    """Prompts per step."""
    num_generations: int
    """Answers per prompt."""
    max_num_steps: int
    """Steps of the whole run."""
    max_num_epochs: int | None
    """Passes over the data."""
    first_step: int
    """Steps that are done already."""
    max_turns: int
    """Answers per conversation."""
    max_attempts: int
    """How often a conversation that failed is played, by `rollout.retry`."""
    seed: int
    """The run's seed."""

    def settings(
        self, config: AsynchronousConfig, prompts_per_epoch: int
    ) -> ScheduleSettings:
        """Return what the schedule goes by."""
        most = (config.max_staleness + 1) * self.num_prompts * self.num_generations
        slow_s = config.progress_limit_s
        return ScheduleSettings(
            num_prompts_per_step=self.num_prompts,
            num_generations_per_prompt=self.num_generations,
            prompts_per_epoch=prompts_per_epoch,
            max_num_epochs=self.max_num_epochs,
            max_num_steps=self.max_num_steps,
            max_staleness=config.max_staleness,
            # Between the turns of a conversation its generator has a rest.
            weight_updates="between_answers"
            if self.max_turns == 1
            else "between_tokens",
            max_groups=config.max_groups,
            # The desks put what waits into calls; nothing else has to hold it back.
            answers_per_generator=most,
            answers_per_environment=most,
            max_attempts=config.max_tries + self.max_attempts - 1,
            # What has workers starts them again by itself, and says so if it cannot.
            restarts=RestartPolicy(max_restarts=0),
            limits=WaitLimits(
                answer_s=config.answer_limit_s,
                score_s=config.score_limit_s,
                load_s=slow_s,
                step_s=slow_s,
                save_s=slow_s,
                progress_s=slow_s,
            ),
        )
