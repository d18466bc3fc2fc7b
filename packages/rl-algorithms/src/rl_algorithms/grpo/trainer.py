"""The GRPO trainer.

```
prompts -> rollouts -> (filter) -> advantages -> rows -> [log-probs] -> train -> sync
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rl_algorithms.advantages import make_advantage_estimator
from rl_algorithms.data import DataModule
from rl_algorithms.filters import DynamicSamplingBuffer
from rl_algorithms.grpo.config import GRPOConfig
from rl_algorithms.grpo.rows import build_rows
from rl_algorithms.losses import ClippedPGLossFn
from rl_algorithms.rollout import RolloutConfig, RolloutEngine
from rl_algorithms.trainers.answers import validate_by_answers
from rl_algorithms.trainers.base import BaseTrainer
from rl_algorithms.trainers.batch_plan import BatchPlan
from rl_algorithms.trainers.components import Needs
from rl_algorithms.trainers.data_limits import keep_small_data
from rl_algorithms.trainers.schedule import EarlyStop, ValidationSchedule
from rl_algorithms.trainers.training_rows import (
    count_tokens,
    pad_to_plan,
    train_metrics,
)
from rl_algorithms.trainers.validation import ValidationResult
from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.errors import ConfigError
from rl_distributed.metrics import reduce_metrics
from rl_distributed.timing import Timer

__all__ = ["GRPOTrainer"]


class GRPOTrainer(BaseTrainer[GRPOConfig]):
    """Group-relative policy optimisation (Shao et al., 2402.03300)."""

    algorithm: ClassVar[str] = "grpo"
    config_class: ClassVar[type[GRPOConfig]] = GRPOConfig

    def _needs(self, has_environment: bool) -> Needs:
        if not has_environment:
            raise ConfigError(
                "GRPO needs something that rewards answers: pass reward_fn or "
                "environment to fit, or name one in the section env"
            )
        reference = self.config.loss_fn.needs_reference_logprobs
        return Needs(generation=True, environment=True, reference_policy=reference)

    def _plan_batches(self) -> BatchPlan:
        policy, settings = self.config.policy, self.config.grpo
        prompts, group = (
            settings.num_prompts_per_step,
            settings.num_generations_per_prompt,
        )
        return BatchPlan(
            prompts,
            group,
            policy.train_global_batch_size or prompts * group,
            self.config.num_ranks,
            policy.train_micro_batch_size,
        )

    def _load_data(self, dataset: Any, val_dataset: Any) -> tuple[Any, Any]:
        settings, policy = self.config.grpo, self.config.policy
        assert policy.generation is not None
        data = DataModule(
            keep_small_data(self.config.data, dataset, self.plan.num_prompts),
            self.components.tokenizer,
            kind="prompts",
            batch_size=self.plan.num_prompts,
            val_batch_size=settings.val_batch_size,
            # Each prompt leaves room for the longest answer.
            max_length=policy.max_total_sequence_length
            - policy.generation.max_new_tokens,
            seed=self.config.seed,
            train=dataset,
            validation=val_dataset,
            max_val_rows=settings.max_val_samples,
        )
        self.sample_prompt = data.train_dataset[0]
        return data.train_loader, data.validation_loader()

    def _limits(self) -> tuple[int | None, int | None]:
        return self.config.grpo.max_num_epochs, self.config.grpo.max_num_steps

    def _validation_schedule(self) -> ValidationSchedule:
        s = self.config.grpo
        return ValidationSchedule(
            s.val_period, s.val_start_at, s.val_at_start, s.val_at_end
        )

    def _early_stop(self) -> EarlyStop:
        s = self.config.grpo
        if s.stop_at_validation_threshold is None:
            return EarlyStop()
        return EarlyStop(s.stop_at_validation_metric, s.stop_at_validation_threshold)

    def _build_loss(self) -> ClippedPGLossFn:
        return ClippedPGLossFn(self.config.loss_fn)

    def _setup_algorithm(self) -> None:
        settings = self.config.grpo
        self._loss = self._build_loss()
        self._estimator = make_advantage_estimator(settings.adv_estimator)
        self._rollouts = RolloutEngine(
            self.components.generation,
            self.components.environment,
            self.components.tokenizer,
            RolloutConfig(
                max_turns=settings.max_rollout_turns,
                max_total_sequence_length=self.config.policy.max_total_sequence_length,
            ),
            use_chat_template=self.config.data.apply_chat_template,
        )

    def _train_step(self, batch: Any) -> Mapping[str, Any]:
        rows, metrics = self._sample(batch)
        with self.phase("advantage_calculation"):
            train_rows, row_metrics = build_rows(
                rows, self._estimator, self.config.grpo
            )
            metrics |= row_metrics
        if train_rows is None:
            # Nothing differs within any group: there is nothing to learn from.
            return metrics
        train_rows, rows_per_step = pad_to_plan(train_rows, self.plan)
        metrics |= count_tokens(train_rows)
        self._add_logprobs(train_rows, num_steps=train_rows.size // rows_per_step)
        output = self.train_policy(train_rows, self._loss, rows_per_step)
        return metrics | train_metrics(output)

    def _sample(self, batch: Any) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
        """Sample answers to a batch; with dynamic sampling, to as many as it takes."""
        settings = self.config.grpo
        self.sync_weights()
        if not settings.use_dynamic_sampling:
            return self._run_rollouts(batch, 0)
        size = batch.size * settings.num_generations_per_prompt
        buffer = DynamicSamplingBuffer(size, settings.dynamic_sampling_max_gen_batches)
        collected = []
        first = 0
        while batch is not None:
            rows, metrics = self._run_rollouts(batch, first)
            collected.append(metrics)
            if buffer.add(rows):
                break
            first += batch.size
            batch = self.draw_batch()
        rows, metrics = buffer.take()
        return rows, {**reduce_metrics(collected), **metrics}

    def _run_rollouts(
        self, batch: Any, first: int
    ) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
        timer = Timer()
        with self.phase("generation"):
            result = self._rollouts.run(
                batch,
                num_generations=self.config.grpo.num_generations_per_prompt,
                seed=self.config.seed,
                step=self.state.step,
                first_prompt_index=first,
                timer=timer,
            )
        for name, seconds in timer.get_timing_metrics("sum").items():
            name = "sampling" if name == "generation" else name
            self.timer.record(f"generation/{name}", seconds)
        num_tokens = float(result.rows["generation_lengths"].sum())
        return result.rows, {**result.metrics, "num_generated_tokens": num_tokens}

    def _add_logprobs(self, rows: BatchedDataDict[Any], *, num_steps: int) -> None:
        """Add the log-probs that the loss needs and does not compute itself.

        With one optimizer step the log-probs before the step are those of the step's
        own forward pass, so only several steps need them beforehand.
        """
        policy = self.components.policy
        needs_prev = num_steps > 1 and not self.config.loss_fn.force_on_policy_ratio
        needs_reference = self.config.loss_fn.needs_reference_logprobs
        if not needs_prev and not needs_reference:
            return
        with self.phase("policy_and_reference_logprobs"):
            if needs_prev:
                rows["prev_logprobs"] = policy.get_logprobs(rows)["logprobs"]
            if needs_reference:
                reference = policy.get_reference_policy_logprobs(rows)
                rows["reference_policy_logprobs"] = reference["reference_logprobs"]

    def _validate(self, loader: Any) -> ValidationResult:
        self.sync_weights()
        generation = self.config.policy.generation
        assert generation is not None
        return validate_by_answers(
            self._rollouts,
            loader,
            num_generations=self.config.grpo.val_num_generations_per_prompt,
            seed=self.config.seed,
            greedy=self.config.grpo.val_greedy,
            sampling=generation.sampling_params(validation=True),
        )
