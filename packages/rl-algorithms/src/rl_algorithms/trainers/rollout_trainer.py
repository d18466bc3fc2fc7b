"""`RolloutTrainer`: prompts, rollouts and validation of trainers that sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rl_algorithms.data import DataModule
from rl_algorithms.data.loader import Loader
from rl_algorithms.data.pass_rate_filter import DATA_ROW, PassRateFilter
from rl_algorithms.data.types import PromptRows
from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.rollout import RolloutConfig, RolloutEngine, RolloutResult
from rl_algorithms.rollout.config import RolloutSettings
from rl_algorithms.rollout.result import TrajectoryRows
from rl_algorithms.trainers.base import BaseTrainer
from rl_algorithms.trainers.sampling.answer_validation import validate_by_answers
from rl_algorithms.trainers.sampling.kept_answers import KeptAnswers
from rl_algorithms.trainers.sampling.reward_watch import RewardWatch
from rl_algorithms.trainers.sampling.second_check_watch import SecondCheckWatch
from rl_algorithms.trainers.sampling.unusable_rows import check_rows
from rl_algorithms.trainers.sampling.validation import ValidationResult
from rl_algorithms.trainers.settings.rollout_config import (
    RolloutTrainerConfig,
    SamplingSettings,
)
from rl_algorithms.trainers.setup.components import Needs, present
from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import get_logger
from rl_distributed.timing.timer import Timer
from rl_envs.interfaces import EnvironmentInterface

__all__ = ["RolloutTrainer"]

_logger = get_logger(__name__)
_SETTINGS = tuple(RolloutSettings.model_fields)
"""Keys of the section `rollout` for the engine; the trainer reads the others."""

RolloutConfigT = TypeVar("RolloutConfigT", bound=RolloutTrainerConfig)


class RolloutTrainer(BaseTrainer[RolloutConfigT]):
    """Base of the trainers that sample answers; a subclass trains on them."""

    _reward_watch: RewardWatch | None = None
    _second_checks: SecondCheckWatch | None = None
    _pass_rates: PassRateFilter | None = None
    # A start that failed early closes as well, before `_setup_algorithm` has run.
    _engine: RolloutEngine | None = None

    @property
    def _rollouts(self) -> RolloutEngine:
        return present(self._engine, "rollouts")

    @property
    @abstractmethod
    def _sampling(self) -> SamplingSettings:
        """The algorithm's section of the configuration."""

    def _needs(self, has_environment: bool) -> Needs:
        self.config.check_scorer(is_given=has_environment)
        return Needs(generation=True, environment=True)

    def _load_data(self, dataset: Any, val_dataset: Any) -> Loaders:
        settings, policy = self._sampling, self.config.policy
        assert policy.generation is not None
        data = DataModule(
            self.config.data,
            self.components.required.tokenizer,
            kind="prompts",
            batch_size=self.plan.num_prompts,
            val_batch_size=settings.val_batch_size,
            # Leave room for the longest answer after each prompt.
            max_length=policy.row_limit - policy.generation.max_new_tokens,
            seed=self.config.seed,
            train=dataset,
            validation=val_dataset,
            max_val_rows=settings.max_val_samples,
        )
        self._pass_rates = data.pass_rates
        self.sample_prompt = data.train_dataset[0]
        self._prompts = [
            part
            for part in (data.train_dataset, data.validation_dataset)
            if part is not None
        ]
        return data.train_loader, data.validation_loader()

    def _setup_algorithm(self) -> None:
        for prompts in self._prompts:
            check_rows(self.components.required.environment, prompts, prompts.name)
        # Not needed any more, and a run may last for weeks.
        self._prompts = []
        self._loss = self._build_loss()
        given = dict(self.config.rollout)
        settings = {name: given[name] for name in _SETTINGS}
        self._kept = KeptAnswers(
            self.components.required.tokenizer,
            self.config.rollout.kept_per_step,
            self.config.seed,
        )
        self._reward_watch = self._watch_rewards()
        self._second_checks = SecondCheckWatch(self.config.rollout.max_rejected_rate)
        self._engine = RolloutEngine(
            self.components.required.generation,
            self._scorer(),
            self.components.required.tokenizer,
            RolloutConfig(
                **settings,
                max_turns=self._sampling.max_rollout_turns,
                max_total_sequence_length=self.config.policy.row_limit,
                min_answer_room=self._longest_answer(),
            ),
            use_chat_template=self.config.data.apply_chat_template,
            on_progress=self._at_work.note_progress,
        )

        self._check_agents()

    def _check_agents(self) -> None:
        if self._rollouts.agents is not None and not self.config.trains_branches:
            raise ConfigError(
                "the environment runs agents, whose tasks have several training rows, "
                "which this algorithm cannot train on: use GRPO, one of its presets or "
                "PPO"
            )

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _scorer(self) -> EnvironmentInterface[Any]:
        """Return the environment that judges answers in rollouts."""
        return self.components.required.environment

    def _watch_rewards(self) -> RewardWatch | None:
        """Return a watch for rewards without a learning signal; None for no watch."""
        return RewardWatch()

    def _take_answers(self) -> Sequence[Mapping[str, Any]]:
        return self._kept.take()

    def _end_step(self) -> None:
        watches = (self._reward_watch, self._second_checks)
        for found in (watch.end_step() for watch in watches if watch is not None):
            if found:
                _logger.warning(found)

    def _longest_answer(self) -> int:
        generation = self.config.policy.generation
        assert generation is not None
        return generation.max_new_tokens

    def _run_rollouts(
        self, batch: PromptRows, first: int
    ) -> tuple[TrajectoryRows, dict[str, Any]]:
        """Sample and score answers; `first` is the first prompt's index in the step."""
        timer = Timer()
        with self.phase("generation"):
            result = self._rollouts.run(
                batch,
                num_generations=self._sampling.num_generations_per_prompt,
                seed=self.config.seed,
                step=self.state.step,
                first_prompt_index=first,
                timer=timer,
            )
        for name, seconds in timer.get_timing_metrics("sum").items():
            # The phase around it is called `generation` already.
            name = "sampling" if name == "generation" else name
            self.timer.record(f"generation/{name}", seconds)
        rows, metrics = self._note_rollout(result)
        return rows, {**metrics, **self._note_pass_rates(batch, result)}

    def _note_pass_rates(
        self, batch: PromptRows, result: RolloutResult
    ) -> dict[str, float]:
        """Record the pass rate of each prompt; return metrics of the filter."""
        if self._pass_rates is None:
            return {}
        rows = result.rows
        self._pass_rates.note(
            batch[DATA_ROW],
            rows["group_index"].numpy(),
            # Rewards as the environment gave them, which is the scale of
            # `pass_threshold`.
            rows["rewards"].double().numpy(),
            (rows["sample_mask"] != 0).numpy(),
            rows["generation_lengths"].numpy(),
        )
        return self._pass_rates.metrics

    def _note_rollout(
        self, result: RolloutResult
    ) -> tuple[TrajectoryRows, dict[str, Any]]:
        """Return the training rows of a rollout and its metrics."""
        if self._reward_watch is not None:
            self._reward_watch.note(result.rows)
        if self._second_checks is not None:
            self._second_checks.note(result.rows["metadata"])
        self._kept.choose(result, self.state.step)
        self._at_work.note_answers(result.rows)
        num_tokens = float(result.rows["generation_lengths"].sum())
        return result.rows, {**result.metrics, "num_generated_tokens": num_tokens}

    def _validate(self, loader: Loader) -> ValidationResult:
        self.sync_weights()
        generation = self.config.policy.generation
        assert generation is not None
        return validate_by_answers(
            self._rollouts,
            loader,
            num_generations=self._sampling.val_num_generations_per_prompt,
            seed=self.config.seed,
            greedy=self._sampling.val_greedy,
            sampling=generation.sampling_params(validation=True),
            accuracy_threshold=self._sampling.accuracy_threshold,
        )
