"""The GRPO trainer.

```
prompts -> rollouts (filter) -> [KL] -> advantages -> rows -> [log-probs] -> train
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rl_algorithms.advantages import build_advantage_estimator
from rl_algorithms.advantages.kl_in_reward import add_kl_penalty
from rl_algorithms.data.types import (
    PROMPT_ROWS,
    PromptRows,
)
from rl_algorithms.filters import DynamicSamplingBuffer
from rl_algorithms.grpo.config import GRPOConfig, GRPOSettings
from rl_algorithms.grpo.rows import build_rows, mask_disagreement
from rl_algorithms.rollout import unfold_branches
from rl_algorithms.rollout.result import TrajectoryRows
from rl_algorithms.trainers.policy_gradient_trainer import PolicyGradientTrainer
from rl_algorithms.trainers.steps.training_rows import count_tokens, pad_to_plan
from rl_distributed.metrics import reduce_metrics
from rl_models.tokens.tokenizer import pad_token_id

__all__ = ["GRPOTrainer"]


class GRPOTrainer(PolicyGradientTrainer[GRPOConfig]):
    """Group relative policy optimization (Shao et al., arXiv:2402.03300)."""

    algorithm: ClassVar[str] = "grpo"
    config_class: ClassVar[type[GRPOConfig]] = GRPOConfig

    @property
    def _sampling(self) -> GRPOSettings:
        return self.config.grpo

    def _setup_algorithm(self) -> None:
        super()._setup_algorithm()
        self._estimator = build_advantage_estimator(self.config.grpo.adv_estimator)

    def _sample(
        self, batch: PromptRows
    ) -> tuple[TrajectoryRows | None, dict[str, Any]]:
        """Sample answers to a batch; with dynamic sampling, to as many as needed."""
        settings = self.config.grpo
        if not settings.use_dynamic_sampling:
            return super()._sample(batch)
        pad = pad_token_id(self.components.required.tokenizer)
        buffer = DynamicSamplingBuffer(
            batch.size * settings.num_generations_per_prompt,
            settings.dynamic_sampling_max_gen_batches,
            # -1 stands for no version: padding must not look as if version 0 had
            # sampled it.
            {"input_ids": pad, "token_versions": -1},
            by_named_rewards=settings.adv_estimator.name == "gdpo",
        )
        collected = []
        first = 0
        prompts: PromptRows | None = batch
        while prompts is not None:
            rows, metrics = self._run_rollouts(prompts, first)
            collected.append(metrics)
            if buffer.add(rows):
                break
            # Seeds derive from the prompt's index in the step, so each generation batch
            # continues it.
            first += prompts.size
            drawn = self.draw_batch()
            prompts = None if drawn is None else PROMPT_ROWS.checked(drawn)
        kept, metrics = buffer.take()
        return kept, {**reduce_metrics(collected), **metrics}

    def _learn(self, rows: TrajectoryRows) -> Mapping[str, Any]:
        settings, loss_config = self.config.grpo, self.config.loss_fn
        metrics: dict[str, Any] = {}
        rows = unfold_branches(rows)
        if loss_config.has_kl_reward:
            # The penalty enters the rewards, so even a single optimizer step needs both
            # columns now.
            self._add_logprobs(rows, prev=True, reference=True)
        with self.phase("advantage_calculation"):
            if loss_config.has_kl_reward:
                metrics |= add_kl_penalty(rows, loss_config)
            train_rows, row_metrics = build_rows(rows, self._estimator, settings)
            metrics |= row_metrics
        if train_rows is None:
            # No row is left, so there is nothing to learn from.
            return metrics
        train_rows, global_batch_size = pad_to_plan(train_rows, self.plan)
        threshold = settings.seq_logprob_error_threshold
        # With a single optimizer step, the log-probs before the step are those of its
        # own forward pass. Only several steps need them computed beforehand.
        several_steps = train_rows.size > global_batch_size
        needs_prev = several_steps and not loss_config.force_on_policy_ratio
        self._add_logprobs(
            train_rows,
            prev=needs_prev or threshold is not None,
            reference=loss_config.has_kl_term,
        )
        self._kept.note_training(train_rows)
        if threshold is not None:
            metrics |= mask_disagreement(train_rows, threshold)
        metrics |= count_tokens(train_rows)
        output = self.train_policy(train_rows, self._loss, global_batch_size)
        return metrics | self._policy_metrics(output)
