"""The GRPO trainer.

```
prompts -> rollouts -> (filter) -> advantages -> rows -> [log-probs] -> train -> sync
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rl_algorithms.advantages import make_advantage_estimator
from rl_algorithms.filters import DynamicSamplingBuffer
from rl_algorithms.grpo.config import GRPOConfig, GRPOSettings
from rl_algorithms.grpo.rows import build_rows
from rl_algorithms.losses import ClippedPGLossFn
from rl_algorithms.trainers.components import Needs
from rl_algorithms.trainers.rollout_trainer import RolloutTrainer
from rl_algorithms.trainers.training_rows import (
    count_tokens,
    pad_to_plan,
    train_metrics,
)
from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.metrics import reduce_metrics

__all__ = ["GRPOTrainer"]


class GRPOTrainer(RolloutTrainer[GRPOConfig]):
    """Group-relative policy optimisation (Shao et al., 2402.03300)."""

    algorithm: ClassVar[str] = "grpo"
    config_class: ClassVar[type[GRPOConfig]] = GRPOConfig

    @property
    def _sampling(self) -> GRPOSettings:
        return self.config.grpo

    def _needs(self, has_environment: bool) -> Needs:
        reference = self.config.loss_fn.needs_reference_logprobs
        needs = super()._needs(has_environment)
        return replace(needs, reference_policy=reference)

    def _build_loss(self) -> ClippedPGLossFn:
        return ClippedPGLossFn(self.config.loss_fn)

    def _setup_algorithm(self) -> None:
        super()._setup_algorithm()
        self._estimator = make_advantage_estimator(self.config.grpo.adv_estimator)

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
